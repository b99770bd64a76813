"""The pruner: deletes runs whose retention is over, and old rows of the feed, of `once` and of `run_minutes`.

A run is kept for the `retention` of its action, which is fixed when the run ends. The leader prunes. Runs, feed, keys
and minutes are pruned by a task each, so none of them delays the others. Each works in batches, every batch a
transaction of its own. Between two batches it pauses for as long as the last one took, so it uses at most half of a
connection's time.

Runs: a statement without locks reads which runs are expired, from where the last batch ended. (An index keeps the
entries of deleted rows until vacuum, and a single open snapshot delays vacuum.) Then a transaction deletes at most
`BATCH` of them that have at most `MAX_EVENTS` events together, within `TIME_LIMIT`. `runs/prune.py` has the statements.

    case                                           effect
    a batch takes longer than `TIME_LIMIT`         PostgreSQL cancels it; the next batch is half as large
    a single run takes longer                      it is skipped, logged once, and tried again after `RESTART_INTERVAL`
    another session has locked a run's row         it is skipped, and tried again after `RESTART_INTERVAL`
    a run has more than `MAX_EVENTS` events        it is marked; its events are deleted in parts, and then the run
    the leader dies                                the next leader goes on: what was committed is deleted

Two leaders at a time would skip each other's rows. Nothing else depends on the leader: a slot whose key was deleted
cannot make another run, because `next_run_at` has advanced past it.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import psycopg

from app.fleet.background import LoopErrors, Service, cancel_and_wait
from app.fleet.cluster.member import Member
from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Database
from app.fleet.engine.figures.run_minutes import prune_minutes
from app.fleet.engine.once.housekeeping import prune_keys
from app.fleet.runs.effects.feed_pruner import FeedPruner
from app.fleet.runs.prune import EXPIRED, MARK, PRUNE, PRUNE_EVENTS
from app.fleet.telemetry.logs import event_log

INTERVAL = 10.0
# The feed, the keys and the minutes are pruned in every sixth interval: an idle leader sends few statements.
SELDOM = 6
BATCH = 1000
# How many events one statement deletes.
MAX_EVENTS = 10_000
# Seconds for one transaction.
TIME_LIMIT = 2.0
# How long after a pass that began at the lowest `expires_at` another one begins there: it finds what was skipped.
RESTART_INTERVAL = 600.0
# The shortest pause between two batches of the feed: another session may have the feed's lock.
MIN_PAUSE = 0.01

log = event_log(__name__)

SET_TIME_LIMIT = Statement("SELECT set_config('statement_timeout', %(limit)s, true)")

# Below every `expires_at` of a run that is not marked.
EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
LONG_AGO = datetime.fromisoformat("2000-01-01T00:00:00+00:00")


class ExpiredRun(NamedTuple):
    id: int
    # The number of its events, including the events that were never written as rows.
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
        # The `expires_at` at which the next pass begins, and when a pass begins at the lowest one again.
        self._floor = EPOCH
        self._restart_at = 0.0
        # The runs that were skipped and logged.
        self._skipped: set[int] = set()
        self._feed = FeedPruner()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def skipped(self) -> int:
        """The number of runs that could not be deleted in time, and will be tried again."""
        return len(self._skipped)

    async def _start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._prune_for_ever(what, prune, rounds), name=f"prune-{what}")
            for what, prune, rounds in (
                ("runs", self.prune, itertools.count(1)),
                ("feed", self.prune_feed, itertools.count(SELDOM, SELDOM)),
                ("keys", self.prune_keys, itertools.count(SELDOM // 2, SELDOM)),
                ("minutes", self.prune_minutes, itertools.count(SELDOM - 1, SELDOM)),
            )
        ]

    async def _stop(self) -> None:
        for task in self._tasks:
            await cancel_and_wait(task)

    async def _prune_for_ever(self, what: str, prune: Callable[[], Awaitable[object]], rounds: Iterator[int]) -> None:
        """Prune in these rounds, which are `INTERVAL` apart. Of failures in a row, the first is logged as a warning."""
        errors = LoopErrors(
            log,
            service="pruner",
            defect="engine.defect",
            failed="pruner.failed",
            warn_when=lambda failures: failures == 1,
            defect_pause=0.0,
            what=what,
        )
        waited = 0
        for round_ in rounds:
            await asyncio.sleep(INTERVAL * (round_ - waited))
            waited = round_
            if self._member.leading:
                async with errors.logged():
                    await prune()

    async def prune_feed(self) -> None:
        """Delete the rows of the feed whose retention is over."""
        loop = asyncio.get_running_loop()
        more = True
        while more:
            began = loop.time()
            async with self._database.autocommit() as connection:
                more = await self._feed.step(connection, self._database.namespace)
            await asyncio.sleep(max(MIN_PAUSE, loop.time() - began))

    async def prune_keys(self) -> None:
        """Delete the keys of `once` whose retention is over."""
        loop = asyncio.get_running_loop()
        count, floor = BATCH, LONG_AGO
        while count >= BATCH:
            began = loop.time()
            async with self._database.autocommit() as connection:
                count, floor = await prune_keys(connection, self._database.namespace, floor, BATCH)
            await asyncio.sleep(loop.time() - began)

    async def prune_minutes(self) -> None:
        """Delete the rows of minutes that no chart shows any more."""
        loop = asyncio.get_running_loop()
        count = BATCH
        while count >= BATCH:
            began = loop.time()
            async with self._database.autocommit() as connection:
                count = await prune_minutes(connection, self._database.namespace, BATCH)
            await asyncio.sleep(loop.time() - began)

    async def prune(self) -> int:
        """Delete the expired runs, from where the last pass ended; return how many."""
        before, now = self.pruned, asyncio.get_running_loop().time()
        if now >= self._restart_at:
            self._floor, self._restart_at = EPOCH, now + RESTART_INTERVAL
        full = True
        while full:
            gone = self.pruned
            async with self._database.autocommit() as connection:
                values = {"floor": self._floor, "batch": BATCH}
                rows = await (await connection.execute(self._database.namespace.sql(EXPIRED), values)).fetchall()
            await self._prune_all([ExpiredRun(*row) for row in rows])
            if rows:
                self._floor = rows[-1][2]
            full = len(rows) == BATCH and self.pruned > gone
        return self.pruned - before

    async def _prune_all(self, old: Sequence[ExpiredRun]) -> None:
        """Delete these runs in batches, each within `TIME_LIMIT`; skip a run that takes longer."""
        loop = asyncio.get_running_loop()
        done = 0
        while done < len(old):
            began = loop.time()
            batch = self._next(old[done:])
            if batch[0].events > MAX_EVENTS:
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

    def _next(self, old: Sequence[ExpiredRun]) -> Sequence[ExpiredRun]:
        """Return the first of these runs, as many as one statement may delete; a run with very many events is alone."""
        sums = itertools.accumulate(each.events for each in old[: self._batch])
        return old[: max(1, sum(1 for events in sums if events <= MAX_EVENTS))]

    def _skip(self, run: ExpiredRun) -> None:
        if run.id not in self._skipped:
            self._skipped.add(run.id)
            log.warning("pruner.skipped", run=run.id, events=run.events, seconds=TIME_LIMIT)

    async def _prune_runs(self, old: Sequence[ExpiredRun]) -> bool:
        """Delete these runs in one transaction; return whether it took less than `TIME_LIMIT`."""
        gone = await self._in_time(PRUNE, {"ids": [each.id for each in old]})
        if gone is None:
            return False
        self.pruned += gone
        self._skipped.difference_update(each.id for each in old)
        return True

    async def _prune_long(self, run: ExpiredRun) -> bool:
        """Mark this run, delete its events in parts, and then the run."""
        loop = asyncio.get_running_loop()
        marked = await self._in_time(MARK, {"id": run.id})
        if not marked:
            return marked is not None
        for after in range(0, run.events, MAX_EVENTS):
            began = loop.time()
            values = {"id": run.id, "after": after, "upto": after + MAX_EVENTS}
            if await self._in_time(PRUNE_EVENTS, values) is None:
                return False
            await asyncio.sleep(loop.time() - began)
        return await self._prune_runs([run])

    async def _in_time(self, statement: Statement, values: dict[str, Any]) -> int | None:
        """Execute a statement in a transaction of its own; return its row count, None if `TIME_LIMIT` was exceeded."""
        try:
            async with self._database.connection() as connection:
                await connection.execute(SET_TIME_LIMIT, {"limit": f"{TIME_LIMIT * 1000:.0f}"})
                cursor = await connection.execute(self._database.namespace.sql(statement), values)
        except psycopg.errors.QueryCanceled:
            return None
        return cursor.rowcount
