"""How figures are printed: a distribution says more than a mean."""

import math
import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of all does not exceed; no interpolation between what was measured."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def distribution(label: str, seconds: Sequence[float], *, bound_ms: float | None = None) -> str:
    """One line: count, p50, p90, p99, most, and whether a bound was kept."""
    p50, p90, p99 = (percentile(seconds, share) * 1000 for share in (0.5, 0.9, 0.99))
    most = max(seconds) * 1000
    line = f"{label:<38} n={len(seconds):<4} p50 {p50:6.1f}  p90 {p90:6.1f}  p99 {p99:6.1f}  max {most:6.1f} ms"
    if bound_ms is not None:
        line += f"   p99 ≤ {bound_ms:.0f} ms: {'kept' if p99 <= bound_ms else 'NOT KEPT'}"
    return line


def histogram(seconds: Sequence[float], *, width_ms: float = 50) -> str:
    """Bars of so many milliseconds each."""
    buckets: dict[int, int] = {}
    for value in seconds:
        buckets[int(value * 1000 // width_ms)] = buckets.get(int(value * 1000 // width_ms), 0) + 1
    lines = [
        f"    {bucket * width_ms:5.0f} ms  {'█' * count} {count}"
        for bucket, count in ((each, buckets.get(each, 0)) for each in range(min(buckets), max(buckets) + 1))
    ]
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    return f"median {statistics.median(values):.2f}, from {min(values):.2f} to {max(values):.2f}"
