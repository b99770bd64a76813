"""Durations as people write them: `30s`, `5m`, `1h30m`, `500ms`; or a number of seconds, or a timedelta."""

import re
from datetime import timedelta

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
TEXT_MOST = 100
# How long ago something can be asked for.
LONGEST_AGO = 3650 * 86400.0
PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")

Duration = str | float | timedelta
# The longest that a service may be given. PostgreSQL could add more to an instant than Python can read.
LONGEST = 366 * 86400.0


def seconds(duration: Duration) -> float:
    """Read a duration: seconds, a timedelta, or a text such as `90s`, `1h30m`, `500ms`."""
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    if isinstance(duration, int | float) and not isinstance(duration, bool):
        return of_number(duration)
    text = str(duration).replace(" ", "")
    if len(text) > TEXT_MOST or not re.fullmatch(rf"(?:{PART.pattern})+", text):
        given = repr(duration) if len(text) <= TEXT_MOST else f"a text of {len(text)} characters"
        raise ValueError(f"{given} is not a duration: write it like '30s', '5m', '1h30m' or '500ms'")
    return sum(float(amount) * UNITS[unit] for amount, unit in PART.findall(text))


def of_number(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        raise ValueError("this number of seconds is not a duration: it is beyond what a number can be") from None


def written(duration: float) -> str:
    """Write a duration the way it can be read again."""
    for unit in ("d", "h", "m"):
        if duration >= UNITS[unit] and duration % UNITS[unit] == 0:
            return f"{duration / UNITS[unit]:.0f}{unit}"
    return f"{duration:.12g}s" if duration >= 1 or duration == 0 else f"{duration * 1000:.12g}ms"


def wait(duration: Duration) -> float:
    """Read how long to wait: from 0 seconds to `LONGEST`."""
    value = seconds(duration)
    if not 0 <= value <= LONGEST:
        raise ValueError(f"a wait is from 0 s to {written(LONGEST)}, and not {value:g} s")
    return value
