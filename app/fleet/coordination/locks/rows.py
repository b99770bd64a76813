"""The rows of this instance in `service_locks` and `lock_waiters`: releasing them, and finding orphaned ones.

A row is orphaned if it has this instance's id and belongs to no task: a waiter whose caller gave up while the database
was away, or a lock that was taken while the answer was lost. An orphaned row would block the lock for a whole
`ttl`. So the instance reads its own rows, and releases the orphaned ones, whenever

- a statement that writes such a row has failed, and again `LATE_COMMIT` later, because the statement may still commit;
- the link is up, at first or again;
- a lock was granted to a waiter that belongs to no task here.

A statement in flight may have written a row before its task has the answer. Such a row is released only when all
statements that were in flight for its lock when the row was first seen have ended.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psycopg

from app.fleet.background import BackgroundTasks
from app.fleet.cluster.member import Member
from app.fleet.cluster.registry import Identity
from app.fleet.coordination.locks import statements
from app.fleet.coordination.locks.held import LockRequest
from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Database
from app.fleet.db.pool.statements import fetch
from app.fleet.errors import DatabaseError
from app.fleet.telemetry.logs import event_log

# When a connection breaks, its statement may still commit, but no later: `client_connection_check_interval` is 1 s.
LATE_COMMIT = 3.0
ORPHAN_INTERVAL = 0.25
# The interval between two polls: at first, and after several without a result.
MIN_POLL_INTERVAL = 0.05
MAX_POLL_INTERVAL = 5.0
BACKOFF = 2.0
LINK_CHECK_INTERVAL = 0.05

log = event_log(__name__)


class LockRows:
    """The rows of one instance, and which of them belong to its tasks."""

    def __init__(self, database: Database, member: Member) -> None:
        # The rows that belong to a task here. A lock, by name and token, belongs to one until the end of its release,
        # even if the lock is lost before that.
        self.locks: set[tuple[str, int]] = set()
        self.waiters: set[int] = set()
        # Set when there may be orphaned rows.
        self.orphans_suspected = asyncio.Event()
        self.background = BackgroundTasks()
        self._database = database
        self._member = member
        # By the lock's name, an object for each statement in flight that may insert or release a row of this instance.
        self._in_flight: dict[str, set[object]] = {}
        # Unknown rows, and the statements that were in flight when each was first seen.
        self._unknown: dict[tuple[Any, ...], set[object]] = {}

    async def identity(self) -> Identity:
        """Wait until this instance may act as the holder of anything."""
        while (me := self._member.identity) is None or not self._member.holds():  # noqa: ASYNC110 — it is a clock
            await asyncio.sleep(LINK_CHECK_INTERVAL)
        return me

    async def fetch(self, statement: Statement, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        async with self._database.autocommit() as connection:
            return await fetch(connection, self._database.namespace.sql(statement), values)

    def values(self, request: LockRequest, me: Identity) -> dict[str, Any]:
        return {
            "name": request.name,
            "me": me.id,
            "instance": me.name,
            "hostname": self._member.registration.hostname,
            "pid": self._member.registration.pid,
            "holder": request.holder,
            "ttl": timedelta(seconds=request.ttl),
            "held": list(request.held),
        }

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Run statements that may insert or release a row for this lock. If one fails, its effect is unknown."""
        statement = object()
        self._in_flight.setdefault(name, set()).add(statement)
        try:
            yield
        except BaseException:
            self.orphans_suspected.set()
            asyncio.get_running_loop().call_later(LATE_COMMIT, self.orphans_suspected.set)
            raise
        finally:
            self._in_flight[name].discard(statement)
            if not self._in_flight[name]:
                del self._in_flight[name]

    # -- releasing ----------------------------------------------------------------------------------------------------

    async def release(self, name: str, token: int, owner: Identity) -> bool:
        """Release a lock and grant it to the next waiter; false if it had another holder already."""
        values = {"name": name, "token": token, "me": owner.id}
        try:
            with self.writing(name):
                if await self.fetch(statements.RELEASE, values):
                    return True
                if not await self.fetch(statements.RELEASE_WITHOUT_GRANT, values):
                    return False
        except (psycopg.Error, DatabaseError) as error:
            # From now on, the row belongs to no task: it is released as an orphan.
            log.info("lock.released_later", lock=name, token=token, reason=" ".join(str(error).split()))
            return True
        finally:
            self.locks.discard((name, token))
        self.background.start(self._grant_later(name, token))
        return True

    async def _grant_later(self, name: str, token: int) -> None:
        """Grant a lock to the next waiter that was released while a transaction guarded by it was open."""
        interval = MIN_POLL_INTERVAL
        values = {"name": name, "token": token}
        with suppress(psycopg.Error, DatabaseError):
            while not await self.fetch(statements.GRANT_RELEASED, values):
                if not await self.fetch(statements.IS_RELEASED, values):
                    return
                await asyncio.sleep(interval)
                interval = min(interval * BACKOFF, MAX_POLL_INTERVAL)

    async def leave_queue(self, name: str, waiter: int) -> None:
        with suppress(psycopg.Error, DatabaseError), self.writing(name):
            if not await self.fetch(statements.LEAVE_QUEUE, {"waiter": waiter}):
                # The lock was granted to this waiter meanwhile.
                self.orphans_suspected.set()

    # -- orphaned rows ------------------------------------------------------------------------------------------------

    async def release_orphans_when_suspected(self) -> None:
        while True:
            await self.orphans_suspected.wait()
            # Before the rows are read: what is suspected meanwhile needs another read.
            self.orphans_suspected.clear()
            again = True
            try:
                again = await self.release_orphans()
            finally:
                if again:
                    self.orphans_suspected.set()
            if again:
                await asyncio.sleep(ORPHAN_INTERVAL)

    async def release_orphans(self) -> bool:
        """Release the rows that belong to no task here; true if there were any."""
        me = await self.identity()
        rows = await self.fetch(statements.READ_OWN_ROWS, {"me": me.id})
        unknown = [row for row in rows if row[:2] not in self.locks and row[2] not in self.waiters]
        self._unknown = {row: self._unknown.get(row) or set(self._in_flight.get(row[0], ())) for row in unknown}
        for row in unknown:
            name, token, waiter = row
            if self._unknown[row] & self._in_flight.get(name, set()):
                continue
            log.info("lock.orphan_released", lock=name, token=token, waiter=waiter)
            if token is None:
                await self.fetch(statements.LEAVE_QUEUE, {"waiter": waiter})
            else:
                await self.release(name, token, me)
        return bool(unknown)
