"""Retention: runs are pruned when their retention is over, with their events and their keys; the feed and the keys of
`once` are pruned too.

How long a run is kept is its action's `retention`, fixed when the run ends. The leader prunes. Each of the three prunes
is a task of its own: one that fails or is slow does not hold up the others. Each works in batches, every batch a
transaction of its own; between two batches it rests for as long as the last one took, so that it never has more than
half of a connection's time.

Runs. A statement without locks reads which runs may go, beginning where the last batch ended: an index keeps the
entries of deleted rows until vacuum removes them, which a single open snapshot delays. Then a transaction deletes at
most `BATCH` of them that have at most `EVENTS` events together, within `LIMIT`.

    what happens                                   effect
    a batch takes longer than `LIMIT`              the server ends it; the next is half as large
    a single run takes longer                      it is skipped, logged once, and tried again after `AGAIN`
    another session has a run's row locked         it is skipped, and tried again after `AGAIN`
    a run has more than `EVENTS` events            its `expires_at` is set to the epoch, from when on it can neither be
                                                   retried nor followed; then its events are deleted, `EVENTS` in a
                                                   transaction, and at last the run
    the leader dies in between                     the next leader goes on: what was committed is gone

Two leaders would skip each other's rows. Nothing else depends on it: a slot whose key was pruned cannot come again,
because `next_run_at` has moved past it.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import psycopg

from app.fleet.background import Service, cancel_and_wait
from app.fleet.cluster.member import Member
from app.fleet.db.namespace import Statement
from app.fleet.db.pool import Database
from app.fleet.engine.once.housekeeping import prune_keys
from app.fleet.errors import DatabaseError
from app.fleet.runs.feed_pruner import FeedPruner
from app.fleet.telemetry.logs import events

EVERY = 10.0
# The feed and the keys are pruned less often: their statements would be a good part of what an idle leader asks.
SELDOM = 6
BATCH = 1000
# How many events one statement deletes.
EVENTS = 10_000
LIMIT = 2.0
# How long after a pass from the lowest `expires_at` on the next one begins there: it meets what was skipped.
AGAIN = 600.0
# The shortest rest between two batches of the feed: another session may have the lock.
REST = 0.01

log = events(__name__)

LIMITED = Statement("SELECT set_config('statement_timeout', %(limit)s, true)")

OLD = Statement("""
SELECT id, events, expires_at
FROM {schema}.finished_runs
WHERE expires_at >= %(floor)s AND expires_at < statement_timestamp()
ORDER BY expires_at
LIMIT %(batch)s
""")

# A run that was retried meanwhile is not there any more, or has another `expires_at`.
PRUNE = Statement("""
WITH old AS MATERIALIZED (
    SELECT id
    FROM {schema}.finished_runs
    WHERE id = ANY (%(ids)s::int8[]) AND expires_at < statement_timestamp()
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {schema}.finished_runs WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
), events AS (
    DELETE FROM {schema}.run_events WHERE run_id = ANY (ARRAY(SELECT id FROM old))
), keys AS (
    DELETE FROM {schema}.run_keys WHERE run_id = ANY (ARRAY(SELECT id FROM old))
)
SELECT id FROM gone
""")

MARK = Statement("""
UPDATE {schema}.finished_runs
SET expires_at = 'epoch'
WHERE id = (
    SELECT id
    FROM {schema}.finished_runs
    WHERE id = %(id)s AND expires_at < statement_timestamp()
    FOR UPDATE SKIP LOCKED
)
RETURNING id
""")

PRUNE_EVENTS = Statement("""
DELETE FROM {schema}.run_events
WHERE run_id = %(id)s AND seq > %(after)s AND seq <= %(upto)s
""")

# No run expires earlier, but for those that are marked.
EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
LONG_AGO = datetime.fromisoformat("2000-01-01T00:00:00+00:00")


class Old(NamedTuple):
    id: int
    # How many events it has, those included that were never written.
    events: int
    expires_at: datetime


class Pruner(Service):
    name = "pruner"

    def __init__(self, database: Database, member: Member) -> None:
        super().__init__()
        self.pruned = 0
        self._database = database
        self._member = member
        self._batch = BATCH
        # Where the next pass begins, and when one begins at the lowest again.
        self._floor = EPOCH
        self._anew_at = 0.0
        # Runs that were skipped and logged.
        self._skipped: set[int] = set()
        self._feed = FeedPruner()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def skipped(self) -> int:
        """How many runs could not be deleted in time, and will be tried again."""
        return len(self._skipped)

    async def _start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._prune_for_ever(what, prune, rounds), name=f"prune-{what}")
            for what, prune, rounds in (
                ("runs", self.prune, itertools.count(1)),
                ("feed", self.prune_feed, itertools.count(SELDOM, SELDOM)),
                ("keys", self.prune_keys, itertools.count(SELDOM // 2, SELDOM)),
            )
        ]

    async def _stop(self) -> None:
        for task in self._tasks:
            await cancel_and_wait(task)

    async def _prune_for_ever(self, what: str, prune: Callable[[], Awaitable[object]], rounds: Iterator[int]) -> None:
        """Prune in these rounds, which are `EVERY` apart. What fails is logged once, until it works again."""
        failing, waited = False, 0
        for round_ in rounds:
            await asyncio.sleep(EVERY * (round_ - waited))
            waited = round_
            if not self._member.leading:
                continue
            try:
                await prune()
                failing = False
            except (psycopg.Error, DatabaseError) as error:
                if not failing:
                    log.warning("pruner.failed", what=what, reason=" ".join(str(error).split()))
                failing = True
            except Exception as error:  # noqa: BLE001 — a defect of ours must not end it for good
                log.error("engine.defect", error=error, service="pruner")

    async def prune_feed(self) -> None:
        """Delete what the feed has kept for long enough."""
        loop = asyncio.get_running_loop()
        more = True
        while more:
            began = loop.time()
            async with self._database.autocommit() as connection:
                more = await self._feed.step(connection, self._database.namespace)
            await asyncio.sleep(max(REST, loop.time() - began))

    async def prune_keys(self) -> None:
        """Delete the keys whose time is over."""
        loop = asyncio.get_running_loop()
        count, floor = BATCH, LONG_AGO
        while count >= BATCH:
            began = loop.time()
            async with self._database.autocommit() as connection:
                count, floor = await prune_keys(connection, self._database.namespace, floor, BATCH)
            await asyncio.sleep(loop.time() - began)

    async def prune(self) -> int:
        """Delete the runs that may go now, beginning where the last pass ended; return how many."""
        before, now = self.pruned, asyncio.get_running_loop().time()
        if now >= self._anew_at:
            self._floor, self._anew_at = EPOCH, now + AGAIN
        full = True
        while full:
            gone = self.pruned
            async with self._database.autocommit() as connection:
                values = {"floor": self._floor, "batch": BATCH}
                rows = await (await connection.execute(self._database.namespace.sql(OLD), values)).fetchall()
            await self._prune_all([Old(*row) for row in rows])
            if rows:
                self._floor = rows[-1][2]
            full = len(rows) == BATCH and self.pruned > gone
        return self.pruned - before

    async def _prune_all(self, old: Sequence[Old]) -> None:
        """Prune these runs in batches, each of which takes less than `LIMIT`; skip a run that takes longer."""
        loop = asyncio.get_running_loop()
        done = 0
        while done < len(old):
            began = loop.time()
            batch = self._next(old[done:])
            if batch[0].events > EVENTS:
                in_time = await self._prune_long(batch[0])
            else:
                in_time = await self._prune_runs(batch)
            if in_time:
                self._batch = min(BATCH, self._batch * 2)
            elif len(batch) == 1:
                self._skip(batch[0])
            else:
                self._batch = max(1, len(batch) // 2)
                log.info("pruner.slowed", batch=self._batch)
            if in_time or len(batch) == 1:
                done += len(batch)
            await asyncio.sleep(loop.time() - began)

    def _next(self, old: Sequence[Old]) -> Sequence[Old]:
        """Return the first of these, as many as one statement may delete; a run with very many events is alone."""
        written = itertools.accumulate(each.events for each in old[: self._batch])
        return old[: max(1, sum(1 for many in written if many <= EVENTS))]

    def _skip(self, run: Old) -> None:
        if run.id not in self._skipped:
            self._skipped.add(run.id)
            log.warning("pruner.skipped", run=run.id, events=run.events, seconds=LIMIT)

    async def _prune_runs(self, old: Sequence[Old]) -> bool:
        """Delete these runs in one transaction; return whether it took less than `LIMIT`."""
        gone = await self._in_time(PRUNE, {"ids": [each.id for each in old]})
        if gone is None:
            return False
        self.pruned += gone
        self._skipped.difference_update(each.id for each in old)
        return True

    async def _prune_long(self, run: Old) -> bool:
        """Delete the events of this run a part at a time, and then the run."""
        loop = asyncio.get_running_loop()
        marked = await self._in_time(MARK, {"id": run.id})
        if not marked:
            return marked is not None
        for after in range(0, run.events, EVENTS):
            began = loop.time()
            values = {"id": run.id, "after": after, "upto": after + EVENTS}
            if await self._in_time(PRUNE_EVENTS, values) is None:
                return False
            await asyncio.sleep(loop.time() - began)
        return await self._prune_runs([run])

    async def _in_time(self, statement: Statement, values: dict[str, Any]) -> int | None:
        """Run a statement in a transaction of its own; return how many rows, or None if it took longer than `LIMIT`."""
        try:
            async with self._database.connection() as connection:
                await connection.execute(LIMITED, {"limit": f"{LIMIT * 1000:.0f}"})
                cursor = await connection.execute(self._database.namespace.sql(statement), values)
        except psycopg.errors.QueryCanceled:
            return None
        return cursor.rowcount
