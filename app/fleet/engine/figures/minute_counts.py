"""What happened to runs on this instance since the last flush (`run_minutes.py`), for each minute and action.

`RunMetrics` reports claims and ends in batches, because this is on the path of every run: a batch costs a few additions
here, and its runs cost the sum and the maximum of durations that were computed already.

The minute is PostgreSQL's at the report, as this instance knows it. What is reported before the instance knows
PostgreSQL's time stays here until it does, and then counts for that minute: this is the first second after a start.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias

# How many pairs of a minute and an action are kept while they cannot be written.
MAX_PAIRS = 10_000


@dataclass(slots=True)
class Counts:
    """What happened to runs of an action within a minute. Durations are in microseconds."""

    # The attempts that ended, by outcome, and how long their actions ran.
    ended: Counter[str] = field(default_factory=Counter)
    work: int = 0
    # The first attempts that began, and how long their runs had waited since they were due.
    begun: int = 0
    waited: int = 0
    longest_wait: int = 0

    def add(self, other: "Counts") -> None:
        self.ended.update(other.ended)
        self.work += other.work
        self.begun += other.begun
        self.waited += other.waited
        self.longest_wait = max(self.longest_wait, other.longest_wait)


# By minute and action.
Pairs: TypeAlias = Mapping[tuple[datetime, int], Counts]


class MinuteCounts:
    def __init__(self, now: Callable[[], datetime | None]) -> None:
        """`now` returns PostgreSQL's time, or None as long as it is not known."""
        self._now = now
        # The minute is None as long as PostgreSQL's time is not known.
        self._pairs: dict[tuple[datetime | None, int], Counts] = {}

    def begun(self, action_id: int, waits: Sequence[int]) -> None:
        """Count first attempts by how long their runs have waited; a clock that is a little behind means no time."""
        counts = self._of(action_id)
        counts.begun += len(waits)
        counts.waited += max(0, sum(waits))
        longest = max(waits)
        counts.longest_wait = max(counts.longest_wait, longest)

    def ended(self, action_id: int, outcome: str, attempts: int, work: int) -> None:
        """Count attempts whose end is durable."""
        counts = self._of(action_id)
        counts.ended[outcome] += attempts
        counts.work += work

    def take(self) -> Pairs:
        """Remove and return everything; nothing as long as PostgreSQL's time is not known."""
        present = minute_of(self._now())
        if present is None:
            return {}
        taken: dict[tuple[datetime, int], Counts] = {}
        for (minute, action_id), counts in self._pairs.items():
            taken.setdefault((minute or present, action_id), Counts()).add(counts)
        self._pairs = {}
        return taken

    def put_back(self, pairs: Pairs) -> int:
        """Add what was taken again. Of more than `MAX_PAIRS`, drop the oldest; return how many attempts they count."""
        for key, counts in pairs.items():
            self._pairs.setdefault(key, Counts()).add(counts)
        known = sorted(key for key in self._pairs if key[0] is not None)
        return attempts_of(self._pairs.pop(key) for key in known[: max(0, len(known) - MAX_PAIRS)])

    def _of(self, action_id: int) -> Counts:
        key = (minute_of(self._now()), action_id)
        counts = self._pairs.get(key)
        if counts is None:
            counts = self._pairs[key] = Counts()
        return counts


def minute_of(instant: datetime | None) -> datetime | None:
    return None if instant is None else instant.replace(second=0, microsecond=0)


def attempts_of(counts: Iterable[Counts]) -> int:
    """Return how many attempts that ended are counted there."""
    return sum(each.ended.total() for each in counts)
