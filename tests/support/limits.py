"""Checks the times of permits against a limit, as the limited service would see them."""

from collections.abc import Iterable


def excess(instants: Iterable[float], interval: float, burst: int) -> float:
    """Return the excess of the worst span: its permits beyond `burst` and one per `interval`."""
    excess_so_far, smallest = 0.0, float("inf")
    for number, instant in enumerate(sorted(instants)):
        ahead = number - instant / interval
        smallest = min(smallest, ahead)
        excess_so_far = max(excess_so_far, ahead - smallest + 1 - burst)
    return excess_so_far
