"""What is told of waiting runs can be heard again, and fits into notifications."""

from datetime import UTC, datetime

from app.fleet.engine.actions.action import PRIORITIES
from app.fleet.runs.effects.notifications import QUEUES_PER_NOTIFICATION, parse_notification


def test_each_place_is_heard_with_its_instant_to_the_microsecond() -> None:
    instant = datetime(2026, 11, 18, 17, 30, 0, 123457, UTC)
    microseconds = (instant - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 10**6
    assert list(parse_notification(f"17:-5:{microseconds:.0f},18:0:0")) == [
        (17, -5, instant),
        (18, 0, datetime(1970, 1, 1, tzinfo=UTC)),
    ]


def test_as_many_places_as_are_told_at_once_fit_into_a_notification() -> None:
    longest = f"{2**28}:{PRIORITIES[0]}:{253402300799999999},"
    assert len("runs:") + QUEUES_PER_NOTIFICATION * len(longest) < 8000
