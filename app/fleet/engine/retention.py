"""Retention: runs that ended long enough ago are forgotten, with their events and their keys; and so is the feed.

How long is the action's (`retention`), fixed for a run when it ends. The leader prunes, a batch at a time; a batch that
takes longer than `LIMIT` is ended by the server and tried again at half the size; between two batches it rests for as
long as the last one took, so that pruning never has more than half of a connection's time. Begun from where the last
batch ended: the index still has entries of what was deleted, for as long as somebody's snapshot is open.

Two leaders would skip each other's rows. Nothing else depends on it: a slot whose key was forgotten cannot come again,
because `next_run_at` has moved past it.

The feed (`stream/feed.py`) and the keys of `once` (`once.py`) are forgotten with rests too, but not under `LIMIT`:
nothing hangs on their rows. The feed is, under its readers' lock.
"""

import asyncio
import itertools
from contextlib import suppress
from datetime import datetime

import psycopg

from app.fleet.cluster.member import Member
from app.fleet.db.pool import Database
from app.fleet.engine import once
from app.fleet.errors import DatabaseError
from app.fleet.service import Service, let_go
from app.fleet.stream import feed
from app.fleet.telemetry.logs import events

EVERY = 10.0
# The turns of the feed and of the keys are every sixth, and not the same one: their statements would be a good part of
# what an idle leader asks.
SELDOM = 6
BATCH = 1000
LIMIT = 2.0

log = events(__name__)

LIMITED = "SELECT set_config('statement_timeout', %(limit)s, true)"

PRUNE = """
WITH old AS MATERIALIZED (
    SELECT id, expires_at
    FROM {schema}.finished_runs
    WHERE expires_at >= %(floor)s AND expires_at < statement_timestamp()
    ORDER BY expires_at
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {schema}.finished_runs WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
), events AS (
    DELETE FROM {schema}.run_events WHERE run_id = ANY (ARRAY(SELECT id FROM old))
), keys AS (
    DELETE FROM {schema}.run_keys WHERE run_id = ANY (ARRAY(SELECT id FROM old))
)
SELECT (SELECT count(*) FROM gone), (SELECT max(expires_at) FROM old)
"""

LONG_AGO = datetime.fromisoformat("2000-01-01T00:00:00+00:00")


class Retention(Service):
    name = "retention"

    def __init__(self, database: Database, member: Member) -> None:
        super().__init__()
        self.pruned = 0
        self._database = database
        self._member = member
        self._batch = BATCH
        self._task: asyncio.Task[None] | None = None

    async def _start(self) -> None:
        self._task = asyncio.create_task(self._prune_for_ever(), name="retention")

    async def _stop(self) -> None:
        await let_go(self._task)

    async def _prune_for_ever(self) -> None:
        for turn in itertools.count(1):
            await asyncio.sleep(EVERY)
            if self._member.leading:
                with suppress(psycopg.Error, DatabaseError):
                    await self.prune()
                    if turn % SELDOM == 0:
                        await self.prune_feed()
                    elif turn % SELDOM == SELDOM // 2:
                        await self.prune_keys()

    async def prune_feed(self) -> None:
        """Forget what the feed has kept for long enough, with as much rest in between."""
        loop = asyncio.get_running_loop()
        async with self._database.autocommit() as connection:
            cutoff = await feed.oldest_kept(connection, self._database.namespace)
        count, floor = feed.AT_ONCE, 0
        while count == feed.AT_ONCE:
            began = loop.time()
            async with self._database.connection() as connection:
                count, floor = await feed.forget(connection, self._database.namespace, cutoff, floor)
            await asyncio.sleep(loop.time() - began)

    async def prune_keys(self) -> None:
        """Forget the keys whose time is over, with as much rest in between."""
        loop = asyncio.get_running_loop()
        count, floor = BATCH, LONG_AGO
        while count >= BATCH:
            began = loop.time()
            async with self._database.autocommit() as connection:
                count, floor = await once.forget(connection, self._database.namespace, floor, BATCH)
            await asyncio.sleep(loop.time() - began)

    async def prune(self) -> int:
        """Forget everything that may be forgotten now; return how many runs that were."""
        loop = asyncio.get_running_loop()
        before, floor = self.pruned, LONG_AGO
        while True:
            began = loop.time()
            try:
                count, latest = await self._prune_batch(floor)
            except psycopg.errors.QueryCanceled:
                self._batch = max(1, self._batch // 2)
                log.info("retention.slowed", batch=self._batch)
                continue
            self.pruned += count
            if count < self._batch:
                self._batch = BATCH
                return self.pruned - before
            floor = latest
            await asyncio.sleep(loop.time() - began)

    async def _prune_batch(self, floor: datetime) -> tuple[int, datetime]:
        async with self._database.connection() as connection:
            await connection.execute(LIMITED, {"limit": f"{LIMIT * 1000:.0f}"})
            values = {"floor": floor, "batch": self._batch}
            row = await (await connection.execute(self._database.namespace.sql(PRUNE), values)).fetchone()
        assert row is not None
        return row[0], row[1]
