"""Checks the times of permits against a limit, as the limited service would see them."""

from collections.abc import Iterable


def excess(instants: Iterable[float], interval: float, burst: int) -> float:
    """Return the excess of the worst span: its permits beyond `burst` and one per `interval`."""
    most, least = 0.0, float("inf")
    for number, instant in enumerate(sorted(instants)):
        ahead = number - instant / interval
        least = min(least, ahead)
        most = max(most, ahead - least + 1 - burst)
    return most
