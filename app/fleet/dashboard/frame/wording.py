"""How the dashboard writes times, durations, numbers and schedules."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from cronsim import CronSim
from markupsafe import Markup

from app.fleet.duration import format_duration
from app.fleet.engine.actions.schedule import Schedule

UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
COUNTED = 1000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def span(seconds: float | None) -> str:
    """`850 ms`, `12 s`, `3 min 20 s`, `2 h 5 min`: two units at most."""
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{max(0, seconds) * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = round(seconds)
    words: list[str] = []
    for size, unit in UNITS:
        if left >= size and len(words) < 2:
            words.append(f"{left // size} {unit}")
            left %= size
        elif words:
            break
    return " ".join(words)


def when(instant: datetime | None, now: datetime) -> Markup | str:
    """How long ago, or in how long; the exact time is its title, and machine-readable."""
    if instant is None:
        return ""
    seconds = (now - instant).total_seconds()
    text = "now" if abs(seconds) < 1 else f"{span(seconds)} ago" if seconds > 0 else f"in {span(-seconds)}"
    exact = instant.isoformat(timespec="milliseconds")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(exact, exact, text)


def count(number: int) -> str:
    """A number with separators; counting stops at a thousand, so more is `1,000+`."""
    return f"{COUNTED:,}+" if number > COUNTED else f"{number:,}"


def short(number: float) -> str:
    """A number on an axis, with three digits at most: `950`, `1.2k`, `60k`, `3.5M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"


def outcomes(ended: Mapping[str, int]) -> str:
    """`1,204 succeeded, 3 failed`: how many attempts ended in which way."""
    return ", ".join(f"{number:,} {outcome}" for outcome, number in ended.items() if number) or "none"


def schedule(text: str | None) -> str:
    """Say a schedule in words."""
    if text is None:
        return "on request"
    parsed = Schedule.parse(text)
    if parsed.cron is None:
        return text
    # Any time: only the words of the expression are wanted.
    words = CronSim(parsed.cron, EPOCH).explain()
    jitter = f", up to {format_duration(parsed.jitter)} later" if parsed.jitter else ""
    return f"{words[:1].lower()}{words[1:]}, {parsed.zone}{jitter}"


FILTERS: dict[str, Callable[..., Any]] = {
    "span": span,
    "when": when,
    "count": count,
    "outcomes": outcomes,
    "schedule": schedule,
}
