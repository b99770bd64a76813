"""Durations and rates in the form that people write them.

A duration is a text such as `30s`, `5m`, `1h30m` or `500ms`, a number of seconds, or a timedelta. A rate is a text such
as `10/s`, `100/m` or `5/10s`, spread evenly over that time, with a burst given beside it. Limits and actions read both
in the same way.
"""

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import Self

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
MAX_TEXT_LENGTH = 100
# The longest duration that a service may declare. PostgreSQL can add a longer one to a timestamp than Python can read.
MAX_DURATION = 366 * 86400.0
# How far a query can go back, as in `--since`.
MAX_AGE = 3650 * 86400.0
MAX_BURST = 1_000_000
# Seconds by which a late start may be made up: in any period, at most burst + rate × (period + RATE_TOLERANCE).
RATE_TOLERANCE = 0.05
PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
RATE = re.compile(r"(\d{1,9})/(\d{0,9})(ms|[smhd])")

Duration = str | float | timedelta


def parse_duration(duration: Duration) -> float:
    """Return a duration in seconds."""
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    if isinstance(duration, int | float) and not isinstance(duration, bool):
        try:
            return float(duration)
        except OverflowError:
            raise ValueError("this number of seconds is not a duration: it is too large for a float") from None
    text = str(duration).replace(" ", "")
    if len(text) > MAX_TEXT_LENGTH or not re.fullmatch(rf"(?:{PART.pattern})+", text):
        given = repr(duration) if len(text) <= MAX_TEXT_LENGTH else f"a text of {len(text)} characters"
        raise ValueError(f"{given} is not a duration: write it like '30s', '5m', '1h30m' or '500ms'")
    return sum(float(amount) * UNITS[unit] for amount, unit in PART.findall(text))


def format_duration(seconds: float) -> str:
    """Write a duration as a text that `parse_duration` reads."""
    for unit in ("d", "h", "m"):
        if seconds >= UNITS[unit] and seconds % UNITS[unit] == 0:
            return f"{seconds / UNITS[unit]:.0f}{unit}"
    return f"{seconds:.12g}s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.12g}ms"


def parse_wait(duration: Duration) -> float:
    """Return how long to wait, in seconds: from 0 to `MAX_DURATION`."""
    seconds = parse_duration(duration)
    if not 0 <= seconds <= MAX_DURATION:
        raise ValueError(f"a wait must be from 0 s to {format_duration(MAX_DURATION)}, not {seconds:g} s")
    return seconds


@dataclass(frozen=True)
class Rate:
    """One permit, or one start, every `interval` seconds in the whole cluster; up to `burst` at once after a pause."""

    interval: float
    burst: int

    @classmethod
    def parse(cls, text: str, burst: int = 1) -> Self:
        """Read `10/s`, `100/m` or `5/10s`."""
        found = RATE.fullmatch(str(text).replace(" ", ""))
        if found is None or int(found[1]) == 0 or int(found[2] or 1) == 0:
            raise ValueError(f"{text!r} is not a rate: write it like '10/s', '100/m' or '5/10s'")
        if not isinstance(burst, int) or isinstance(burst, bool) or not 1 <= burst <= MAX_BURST:
            raise ValueError(f"`burst` is {burst!r}, and must be a whole number from 1 to {MAX_BURST}")
        interval = parse_duration(f"{found[2] or 1}{found[3]}") / int(found[1])
        if interval * burst > MAX_DURATION:
            raise ValueError(f"`burst` is {burst}, which at {text} is more than a year's worth")
        return cls(interval, burst)


def format_rate(interval: float) -> str:
    """Write a rate as a text that `Rate.parse` reads: `20/s`, `100/m`, `3/7s`."""
    for unit in ("s", "m", "h", "d"):
        count = UNITS[unit] / interval
        if math.isclose(count, round(count), rel_tol=1e-12):
            return f"{count:.0f}/{unit}"
    per_second = Fraction(1 / interval).limit_denominator(int(MAX_DURATION))
    return f"{per_second.numerator}/{format_duration(per_second.denominator)}"
