"""What an instance counts for each minute and action between two flushes."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest

from app.fleet.engine.figures import minute_counts
from app.fleet.engine.figures.minute_counts import Counts, MinuteCounts

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


class Clock:
    """PostgreSQL's time, as the instance knows it."""

    def __init__(self, at: datetime | None) -> None:
        self.at = at

    def __call__(self) -> datetime | None:
        return self.at


def ended(pairs: Mapping[tuple[datetime, int], Counts]) -> dict[tuple[datetime, int], dict[str, int]]:
    return {key: dict(counts.ended) for key, counts in pairs.items()}


def test_batches_are_added_up_by_minute_and_action() -> None:
    clock = Clock(NOON + timedelta(seconds=1))
    counts = MinuteCounts(clock)
    counts.begun(1, [10, 30])
    counts.begun(1, [20])
    counts.ended(1, "succeeded", 2, 500)
    counts.ended(1, "succeeded", 1, 50)
    counts.ended(1, "failed", 1, 5)
    counts.ended(2, "retried", 4, 0)
    clock.at = NOON + timedelta(seconds=61)
    counts.ended(1, "succeeded", 7, 0)
    later = NOON + timedelta(minutes=1)
    taken = counts.take()
    assert ended(taken) == {
        (NOON, 1): {"succeeded": 3, "failed": 1},
        (NOON, 2): {"retried": 4},
        (later, 1): {"succeeded": 7},
    }
    first = taken[NOON, 1]
    assert (first.begun, first.waited, first.longest_wait, first.work) == (3, 60, 30, 555)
    assert counts.take() == {}, "what was taken is not there again"


def test_a_clock_that_is_a_little_behind_means_no_wait() -> None:
    counts = MinuteCounts(Clock(NOON))
    counts.begun(1, [-200])
    (found,) = counts.take().values()
    assert (found.begun, found.waited, found.longest_wait) == (1, 0, 0)


def test_what_is_put_back_is_added_to_what_came_meanwhile() -> None:
    counts = MinuteCounts(Clock(NOON))
    counts.begun(1, [10])
    counts.ended(1, "failed", 1, 5)
    taken = counts.take()
    counts.begun(1, [5, 3])
    counts.ended(1, "failed", 2, 5)
    assert counts.put_back(taken) == 0
    (found,) = counts.take().values()
    assert found == Counts(found.ended, work=10, begun=3, waited=18, longest_wait=10)
    assert found.ended == {"failed": 3}
    counts.put_back({(NOON, 1): found})
    counts.put_back({(NOON, 1): Counts(begun=1, waited=1, longest_wait=1)})
    assert [each.longest_wait for each in counts.take().values()] == [10]


def test_before_the_time_of_postgresql_is_known_everything_is_kept_for_the_minute_in_which_it_is() -> None:
    clock = Clock(None)
    counts = MinuteCounts(clock)
    counts.ended(1, "succeeded", 2, 0)
    assert counts.take() == {}
    clock.at = NOON
    counts.ended(1, "succeeded", 3, 0)
    assert ended(counts.take()) == {(NOON, 1): {"succeeded": 5}}


def test_of_more_than_the_limit_the_oldest_minutes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minute_counts, "MAX_PAIRS", 3)
    clock = Clock(NOON)
    counts = MinuteCounts(clock)
    for minute in range(5):
        clock.at = NOON + timedelta(minutes=minute)
        counts.ended(1, "succeeded", 10**minute, 0)
    assert counts.put_back(counts.take()) == 11
    assert [key for key, _ in counts.take()] == [NOON + timedelta(minutes=minute) for minute in (2, 3, 4)]
