"""A notification that runs are pending can be parsed, and fits into the size that PostgreSQL allows."""

from datetime import UTC, datetime

from app.fleet.engine.actions.action import PRIORITIES
from app.fleet.runs.effects.notifications import EPOCH, QUEUES_PER_NOTIFICATION, parse_notification, returned_heading


def test_each_queue_is_parsed_with_its_instant_to_the_microsecond() -> None:
    instant = datetime(2026, 11, 18, 17, 30, 0, 123457, UTC)
    microseconds = (instant - EPOCH).total_seconds() * 10**6
    assert list(parse_notification(f"17:-5:{microseconds:.0f},18:0:0")) == [(17, -5, instant), (18, 0, EPOCH)]


def test_a_queue_without_a_priority_is_the_queue_of_the_ordered_runs() -> None:
    assert list(parse_notification("17::0")) == [(17, None, EPOCH)]


def test_the_maximum_number_of_queues_fits_into_a_notification() -> None:
    longest = f"{2**28}:{PRIORITIES[0]}:{253402300799999999},"
    assert len(returned_heading("1.0")) + QUEUES_PER_NOTIFICATION * len(longest) < 8000
