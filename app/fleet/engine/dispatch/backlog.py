"""The backlog: which queues may have runs to claim, as this instance knows it. `dispatch/__init__.py` has the rules.

A queue is the pending runs of one action with one priority; the pending ordered runs of an action are one queue,
whatever their priorities (`ordered.py`). The instance learns of queues from notifications, from its own retries, and
from the reconciler, which reads the database every two seconds. If the backlog is wrong, a claim is late or finds
nothing. Nothing else depends on it.

Each queue has a floor: the instant from which a claim reads it, because no earlier run of it is known. An index keeps
the entries of claimed runs until vacuum removes them, and a single open snapshot anywhere in the database delays
vacuum. A claim that began at the beginning of the index would pass all of these entries, so it begins at the floor.
When a claim finds no more runs, the floor rises to the time of its statement. A notification about an earlier run
lowers it. A run that was invisible at that moment (its transaction committed later, or another claim had locked it and
then rolled back) is found by the reconciler.

When very many queues become due at once, instances that all looked at all of them would mostly find runs that another
instance has locked. So each instance takes its part of the queues, by the id of the action, and looks at the others
after `OTHERS_DELAY`. The reconciler reads how many parts there are, and which one is ours.

The floor has no effect for an action with `concurrency`: each claim counts the running runs, through an index that
keeps the entries of ended runs until vacuum. Under a long snapshot this takes about 6 ms for each 100,000 runs of the
action that have ended since. An action with only a `rate` counts nothing.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from app.fleet.db.server_clock import LONG_AGO, ServerClock
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.dispatch.ordered import ScanCursor

# From this many queues on, the instances divide them, and a claim of an instance reads its whole part.
MANY = 50
OTHERS_DELAY = 0.05
# `run_at` is when a transaction began. Some transactions commit later than others that began after them.
COMMIT_LAG = timedelta(milliseconds=5)

LATEST = datetime.max.replace(tzinfo=UTC)


class QueueKey(NamedTuple):
    action_id: int
    # None for the ordered runs of the action.
    priority: int | None


# An entry of a notification: an action, a priority (None: ordered runs), and from when on a run waits.
Waiting: TypeAlias = tuple[int, int | None, datetime]


@dataclass
class Queue:
    """A queue, as this instance knows it."""

    floor: datetime = LONG_AGO
    # When to claim from it, on the event loop's clock; None if no run is known to wait.
    due: float | None = None
    # A run is known to wait for a later time, so it is worth reading when the next one is due.
    later: bool = False
    # The priority at which its runs are claimed.
    priority: int = 0
    # Where the scan of the ordering keys is; only for a queue of ordered runs.
    cursor: ScanCursor | None = None


DueQueue: TypeAlias = tuple[QueueKey, Queue]


class Request(NamedTuple):
    """A queue to claim from, and how many runs at most."""

    key: QueueKey
    queue: Queue
    limit: int
    # How many runs an earlier request of the same claim takes from this queue.
    passed: int = 0


class Backlog:
    def __init__(self, catalogue: Catalogue, clock: ServerClock) -> None:
        # Our part of the queues, and how many parts there are.
        self.part = (0, 1)
        self._catalogue = catalogue
        self._clock = clock
        self._queues: dict[QueueKey, Queue] = {}
        # The queues that were added during a claim: its answer cannot contain them.
        self._added: dict[QueueKey, datetime] | None = None

    # -- what there is to claim ---------------------------------------------------------------------------------------

    def add_all(self, waiting: Sequence[Waiting], now: float) -> list[Waiting]:
        """Add queues in which runs wait. If they are many, return the queues of other parts, to be added later."""
        ours, parts = self.part if len(waiting) > MANY else (0, 1)
        others = []
        for each in waiting:
            if each[0] % parts == ours:
                self.add(*each, now)
            else:
                others.append(each)
        return others

    def add(self, action_id: int, priority: int | None, run_at: datetime, now: float) -> None:
        """A run waits in this queue from that instant on."""
        action = self._catalogue.of_id(action_id)
        if action is None:
            return
        key = QueueKey(action_id, priority)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = new_queue(key, action, run_at)
        due = max(now, self._clock.loop_time(run_at))
        queue.later |= due > now
        if queue.cursor is not None:
            queue.cursor.begin_round()
            due = max(due, queue.cursor.pauses_until)
        queue.floor = min(queue.floor, run_at)
        queue.due = due if queue.due is None else min(queue.due, due)
        if self._added is not None:
            self._added[key] = min(run_at, self._added.get(key, run_at))

    def add_next_of(self, action_id: int, ordering_key: str) -> None:
        """A run with this ordering key has ended here; the next one may wait."""
        queue = self._queues.get(QueueKey(action_id, None))
        if queue is not None and queue.cursor is not None:
            queue.cursor.ask([ordering_key])

    def add_action(self, action_id: int, now: float) -> None:
        """A limit of this action may allow more runs now."""
        for key, queue in self._queues.items():
            if key.action_id == action_id:
                queue.due = now if queue.cursor is None else max(now, queue.cursor.pauses_until)

    def due(self, now: float, limit: int = 1000) -> list[DueQueue]:
        """Return the due queues: the highest priority first, then those in which a run waits longest, by the second.

        Beyond that the order is random, so that instances that claim at the same moment claim from different queues.
        """
        found = [
            (key, queue)
            for key, queue in self._queues.items()
            if (queue.due is not None and queue.due <= now) or (queue.cursor is not None and queue.cursor.asked)
        ]
        if len(found) > 1:
            begin = random.randrange(len(found))
            found = found[begin:] + found[:begin]
            first = found[0][1]
            if any(queue.priority != first.priority or queue.floor != first.floor for _, queue in found):
                found.sort(key=lambda each: (-each[1].priority, each[1].floor.replace(microsecond=0)))
        return found[:limit]

    def next_due(self) -> float | None:
        """Return when the next queue is due, on the event loop's clock."""
        return min((queue.due for queue in self._queues.values() if queue.due is not None), default=None)

    # -- what a claim has found ---------------------------------------------------------------------------------------

    def begin_claim(self) -> None:
        self._added = {}

    def end_claim(self) -> dict[QueueKey, datetime]:
        """Return what was added during the claim: the queue, and the earliest instant from which a run waits."""
        added, self._added = self._added or {}, None
        return added

    def found_all_asked_for(self, key: QueueKey, latest: datetime) -> None:
        """There may be more: the next claim begins at the latest run of this one."""
        self._queues[key].floor = latest

    def exhausted(self, key: QueueKey, claimed_at: datetime, added: datetime | None) -> None:
        """No more runs were due at that moment."""
        queue = self._queues[key]
        queue.floor = claimed_at - COMMIT_LAG if added is None else min(added, claimed_at)
        if added is None:
            queue.due = None

    def next_is(self, key: QueueKey, run_at: datetime | None, now: float) -> None:
        """The next run of this queue is due then; None if there is none."""
        queue = self._queues[key]
        queue.later = run_at is not None
        if run_at is not None:
            due = max(now, self._clock.loop_time(run_at))
            queue.due = due if queue.due is None else min(queue.due, due)

    def wait(self, key: QueueKey, due: float) -> None:
        """A limit prevents claims from this queue until then."""
        queue = self._queues[key]
        queue.due = due
        if queue.cursor is not None:
            queue.cursor.asked.clear()
            queue.cursor.begin_round()

    def pause_scan(self, queue: Queue, until: float) -> None:
        """Scan no ordering keys before then. The keys in `cursor.asked` do not wait."""
        assert queue.cursor is not None
        queue.cursor.pauses_until = until
        if queue.due is not None:
            queue.due = max(queue.due, until)


def new_queue(key: QueueKey, action: Action[Any], run_at: datetime) -> Queue:
    if key.priority is None:
        return Queue(floor=run_at, priority=action.priority, cursor=ScanCursor())
    return Queue(floor=run_at, priority=key.priority)


def shares(queues: Sequence[DueQueue], room: int, *, is_last: bool) -> list[Request]:
    """Return requests that give each queue of a priority the same share of the room.

    If a queue leaves a part of its share, other queues of the same priority use it first, and then lower priorities. So
    each queue has a second request, for more; but not at the lowest priority of the last group, where the next claim
    continues.
    """
    priorities = [[*group] for _, group in groupby(queues, key=lambda each: each[1].priority)]
    requests = []
    for number, group in enumerate(priorities, 1):
        share = -(-room // len(group))
        requests += [Request(key, queue, share) for key, queue in group]
        if len(group) > 1 and not (is_last and number == len(priorities)):
            requests += [Request(key, queue, room, share) for key, queue in group]
    return requests
