"""Ordered runs: runs of one action with the same ordering key run one at a time, in the order of their ids.

The order follows from the rows alone; no process stores it. For each key, the head is the unfinished run with the
lowest id. A run may be claimed if it is the head, is pending and due, and no run of its key is running. So a head that
waits for a retry, for a later `run_at` or for the rescue of a dead instance blocks its key. When the head has ended,
the next run is the head. Nothing can be lost with a process, because nothing is handed over.

Guarantee: at most one running run for each action and ordering key.
    The unique index `runs_ordered_running` guarantees it, and not the scan. A scan can be stale: a lower id can become
    visible late (its transaction began earlier and committed later), and an operator can retry an old run. Then two
    claims take two runs of a key; the second waits for the commit of the first, violates the index, and claims nothing.

Cost: proportional to the number of keys, and not to the number of runs that wait for a key.
    A claim reads at most `MAX_KEYS` heads, one index probe each, and the next claim goes on after the last key, round
    and round, so every key has its turn. When a run ends here, its key is known, and is asked for without a scan. A
    scan that has passed many keys pauses for a time proportional to their number (`PAUSE`). So thousands of keys that
    all wait for a retry cost no more with every run that is triggered for another key.

    failure                                    effect
    an instance dies while it runs a head      its key waits until the run is rescued, then that run is claimed
    the answer to a claim is lost              the reconciler makes the run pending again
    a notification is lost                     the reconciler finds the queue within two seconds
    another session has locked the head        it is left out, and found by the next scan
    a scan was stale                           the claim violates the unique index, and is tried again after `RETRY`

Not guaranteed: an order between transactions that were open at the same time, except the order in which they become
visible. And an index keeps the entries of ended runs until vacuum: under a long snapshot, the probe for a head passes
them.

Lock order: as for every claim. Two stale claims of the same two keys may wait for each other; PostgreSQL ends one of
them, and it scans again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from app.fleet.cluster.registry import Identity
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Connection
from app.fleet.runs.claim import KEY, Row
from app.fleet.runs.claim_ordered import CLAIM_ORDERED, SCAN_COLUMNS

# How many keys a claim scans.
MAX_KEYS = 1000
# How soon to scan again after a stale scan.
RETRY = 0.01
# How long to pause after a scan of `MAX_KEYS` keys; less after fewer, and not at all if there was no room for more
# runs.
PAUSE = 0.02


@dataclass
class ScanCursor:
    """Where the scan of an action's ordering keys is."""

    # The key that was scanned last. No key is empty.
    after: str = ""
    # Where the present round began, and whether it has passed the last key since.
    start: str = ""
    wrapped: bool = False
    # The earliest `run_at` of the heads that this round has met and that wait for a later time.
    later: datetime | None = None
    # No scan before then, on the event loop's clock. Keys that are asked for do not wait.
    pauses_until: float = 0.0
    # The keys of runs that have ended here.
    asked: dict[str, None] = field(default_factory=dict)

    def begin_round(self) -> None:
        """Scan all keys once more, from here: a run to claim may have any of them."""
        self.start, self.wrapped, self.later = self.after, False, None

    def ask(self, keys: Iterable[str]) -> None:
        """Read the heads of these keys, wherever the scan is."""
        self.asked.update(dict.fromkeys(keys))


class Claimed(NamedTuple):
    """The result of a claim of ordered runs of one action."""

    rows: list[Row]
    # The scan has read all keys.
    complete: bool
    # Seconds to pause before the next scan.
    pause: float
    # The earliest `run_at` of the heads that wait for a later time.
    later: datetime | None


async def claim_heads(
    connection: Connection,
    namespace: Namespace,
    me: Identity,
    cursor: ScanCursor,
    *,
    action: int,
    timeout: float,
    max_keys: int,
    limit: int,
    counted: bool,
) -> Claimed | None:
    """Claim heads of an action's ordering keys; None if the action is paused, or has limits and is not `counted`.

    Raises UniqueViolation if the scan was stale. Nothing is claimed then.
    """
    asked = [cursor.asked.popitem()[0] for _ in range(min(len(cursor.asked), MAX_KEYS))]
    values = {
        "me": me.id,
        "name": me.name,
        "action": action,
        "timeout": timeout,
        "counted": counted,
        "after": cursor.after,
        "wrapped": cursor.wrapped,
        "start": cursor.start,
        "looks": max_keys,
        "most": limit,
        "keys": asked,
    }
    try:
        async with connection.cursor(binary=True) as db_cursor:
            await db_cursor.execute(namespace.sql(CLAIM_ORDERED), values)
            rows = await db_cursor.fetchall()
    except BaseException:
        cursor.ask(asked)
        raise
    if not rows:
        return None
    after, wrapped, scanned, found, later, ready = rows[0][:SCAN_COLUMNS]
    claimed = [each[SCAN_COLUMNS:] for each in rows if each[SCAN_COLUMNS] is not None]
    if ready > len(claimed):
        # They were too heavy for one claim: the next one reads the same keys.
        cursor.ask(asked)
        return Claimed(claimed, complete=False, pause=0.0, later=None)
    cursor.after, cursor.wrapped = after, wrapped
    if len(claimed) == limit:
        # There was not room for all.
        cursor.ask(set(asked).difference([each[KEY] for each in claimed]))
    cursor.later = min(filter(None, (cursor.later, later)), default=None)
    had_room = found < limit
    pause = PAUSE * scanned / MAX_KEYS if had_room else 0.0
    return Claimed(claimed, complete=scanned < max_keys and had_room, pause=pause, later=cursor.later)
