"""How the figures are printed: as distributions and not as means, each with its bar."""

import math
import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that this share of all values does not exceed, without interpolation."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def verdict(kept: bool) -> str:
    return "kept" if kept else "NOT KEPT"


def distribution(
    label: str, seconds: Sequence[float], *, bound_ms: float | None = None, median_ms: float | None = None
) -> str:
    """Format one line: count, p50, p90, p99, maximum, and whether the bounds of p50 and p99 were kept."""
    p50, p90, p99 = (percentile(seconds, share) * 1000 for share in (0.5, 0.9, 0.99))
    longest = max(seconds) * 1000
    line = f"{label:<38} n={len(seconds):<4} p50 {p50:6.1f}  p90 {p90:6.1f}  p99 {p99:6.1f}  max {longest:6.1f} ms"
    if median_ms is not None:
        line += f"   p50 ≤ {median_ms:.0f} ms: {verdict(p50 <= median_ms)}"
    if bound_ms is not None:
        line += f"   p99 ≤ {bound_ms:.0f} ms: {verdict(p99 <= bound_ms)}"
    return line


def rates(label: str, each: Sequence[float], *, least: float | None = None, ours: float | None = None) -> str:
    """Format one line: the rate of each round, their median, and its relation to our rate or to the bar."""
    median = statistics.median(each)
    line = f"{label:<46} {' '.join(f'{rate:>8,.0f}' for rate in each)}   median {median:>8,.0f}/s"
    if ours is not None:
        line += f"   {median / ours:6.3f} of ours"
    if least is not None:
        line += f"   ≥ {least:,.0f}/s: {verdict(median >= least)}"
    return line


def histogram(seconds: Sequence[float], *, width_ms: float = 50) -> str:
    """Draw a histogram with bars of this width."""
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
