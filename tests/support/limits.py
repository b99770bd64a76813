"""What whoever is spared by a limit sees: did any span of time have more than it may?"""

from collections.abc import Iterable


def excess(instants: Iterable[float], interval: float, burst: int) -> float:
    """How many more there were than `burst` and one each `interval`, in the span that had the most of them too many."""
    most, least = 0.0, float("inf")
    for number, instant in enumerate(sorted(instants)):
        ahead = number - instant / interval
        least = min(least, ahead)
        most = max(most, ahead - least + 1 - burst)
    return most
