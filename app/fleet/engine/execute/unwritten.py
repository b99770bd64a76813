"""The writes of this instance's attempts that are not sent yet, and the order in which they are sent.

A round (`next_round`) has at most `BATCH` writes of each kind. The events of an attempt come before its end. Attempts
share the events of a round equally, so an attempt that emits without end delays no other. Writes of an attempt whose
row is locked wait until `unlock`.
"""

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from app.fleet.engine.execute.attempt import Attempt
from app.fleet.engine.execute.batches import Checkpoint, Emitted, Ended, Returned
from app.fleet.runs.effects.events import Event

Write = TypeVar("Write", Ended, Returned, Checkpoint)

BATCH = 1000
# How many events of one attempt a round takes before it takes events of the next attempt.
SHARE = 10
# Characters of events in one statement.
MAX_BATCH_SIZE = 4_194_304


class Kind(enum.StrEnum):
    """The kinds of writes, in the order in which a round writes them."""

    EVENTS = "events"
    CHECKPOINTS = "checkpoints"
    RETURNED = "returned"
    ENDED = "ended"


class Batch(NamedTuple):
    kind: Kind
    writes: Sequence[Any]


class Unwritten:
    def __init__(self) -> None:
        self.ended: list[Ended] = []
        self.returned: list[Returned] = []
        self.checkpoints: list[Checkpoint] = []
        # The attempt whose turn comes last is last.
        self._events: dict[Attempt, deque[Event]] = {}
        # The attempts whose rows another transaction has locked.
        self._locked: set[Attempt] = set()

    def __bool__(self) -> bool:
        return bool(self.ended or self.returned or self.checkpoints or self._events)

    @property
    def locked(self) -> bool:
        """Whether some writes wait for a locked row."""
        return bool(self._locked)

    def add_event(self, attempt: Attempt, event: Event) -> None:
        self._events.setdefault(attempt, deque()).append(event)

    def put_events_back(self, attempt: Attempt, events: Sequence[Event]) -> None:
        self._events.setdefault(attempt, deque()).extendleft(reversed(events))

    def lock(self, attempts: Iterable[Attempt]) -> None:
        self._locked.update(attempts)

    def unlock(self, attempts: Iterable[Attempt]) -> None:
        self._locked.difference_update(attempts)

    def next_round(self) -> list[Batch]:
        """Take the writes of the next round."""
        events = self._next_events()
        checkpoints, self.checkpoints = split(self.checkpoints, self._locked)
        waiting = self._locked.union(self._events) if self._events or self._locked else self._locked
        returned, self.returned = split(self.returned, waiting)
        ended, self.ended = split(self.ended, waiting)
        batches = (
            Batch(Kind.EVENTS, events),
            Batch(Kind.CHECKPOINTS, checkpoints),
            Batch(Kind.RETURNED, returned),
            Batch(Kind.ENDED, ended),
        )
        return [batch for batch in batches if batch.writes]

    def has_more(self) -> bool:
        """Return whether another round would write something now."""
        queues = (self.ended, self.returned, self.checkpoints)
        if not self._locked:
            return bool(self._events) or any(queues)
        return not self._locked.issuperset(self._events) or any(
            each.attempt not in self._locked for queue in queues for each in queue
        )

    def _next_events(self) -> list[Emitted]:
        emitted: list[Emitted] = []
        size = 0
        turns = deque(attempt for attempt in self._events if attempt not in self._locked)
        while turns and len(emitted) < BATCH and size < MAX_BATCH_SIZE:
            attempt = turns.popleft()
            unwritten = self._events.pop(attempt)
            for _ in range(min(len(unwritten), SHARE)):
                event = unwritten.popleft()
                size += event.weight
                emitted.append(Emitted(attempt, event))
            if unwritten:
                self._events[attempt] = unwritten
                turns.append(attempt)
        return emitted


def split(queue: list[Write], waiting: set[Attempt]) -> tuple[list[Write], list[Write]]:
    """Split a queue into what this round writes, and what waits: for its attempt, or for room."""
    if not waiting:
        return queue[:BATCH], queue[BATCH:]
    now: list[Write] = []
    later: list[Write] = []
    for each in queue:
        (now if len(now) < BATCH and each.attempt not in waiting else later).append(each)
    return now, later
