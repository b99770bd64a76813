"""The scheduler: a due slot of an action becomes one run, however many instances look at it.

A transaction turns due slots into runs:

    1  pg_try_advisory_xact_lock for each action    if another instance has the lock, leave the action to it; never wait
    2  read `next_run_at <= now()` again            in a second statement, under the lock: it sees what the previous
                                                    holder of the lock has committed
    3  insert the runs, unique by slot              the second protection: a slot that has a run makes no other
    4  advance `next_run_at`, if it is still        the third
       what step 2 has read
    5  commit                                       releases the locks

No statement here waits for another transaction for longer than 10 ms (`LIMITED`). An action whose row or lock another
transaction holds is left out in step 1 or 2, and tried again after `LOCKED_RETRY`, then less and less often; all other
actions are scheduled meanwhile. So a caller's transaction that stays open delays only the action whose run it creates.

The locks are released by the commit, when the table has the new `next_run_at`. Released any earlier, they would protect
nothing: the next instance would get them a millisecond later and find the actions as due as before.

    failure                        effect
    the instance dies              before 5: nothing has happened, and another instance does it; after 5: the run exists
    the instance freezes           PostgreSQL ends its transaction after 5 s (`SHORT_IDLE`), and releases the locks
    an error                       nothing has happened; it is tried again

"Now" is PostgreSQL's time in both statements. The instance's own clock only decides when to look.

The leader waits for the next slot and is punctual. The others look `BACK_UP` later (role `web`: `WEB_BACK_UP`), at
times that the reconciler gives them. So an idle cluster sends no more statements for having more instances. An instance
schedules only the actions that its code has.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import psycopg

from app.fleet.background import LoopErrors, LoopService, wait_for_event
from app.fleet.cluster.member import Member
from app.fleet.db.namespace import Lock, Statement
from app.fleet.db.pool.pool import Connection, Database
from app.fleet.db.pool.statements import SHORT_IDLE, array
from app.fleet.db.server_clock import ServerClock
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.schedule import Schedule
from app.fleet.lifecycle import Lifecycle
from app.fleet.runs.end import LOCK_TIMEOUT_MS
from app.fleet.runs.insert import INSERT_SLOTS
from app.fleet.telemetry.logs import event_log

# How much later than the leader the other instances schedule, and those of role `web`.
BACK_UP = 1.0
WEB_BACK_UP = 3.0
# More than a thousand: a transaction that finds a thousand due actions knows that these are all.
BATCH = 1024
RETRY = 0.1
# When to try again for actions that another transaction has locked: soon, and then half as often each time.
LOCKED_RETRY = 0.02
MAX_LOCKED_RETRY = 0.5

log = event_log(__name__)

# The lock's first number belongs to the namespace, the second to the action (`db/namespace.py`). The CTE limits the
# rows before the locks are taken: PostgreSQL takes a lock for every row that it evaluates.
LOCK_DUE = Statement("""
WITH due AS MATERIALIZED (
    SELECT id
    FROM {schema}.actions
    WHERE next_run_at <= clock_timestamp() AND paused_at IS NULL AND id = ANY (%(actions)s::int[])
    ORDER BY next_run_at, id
    LIMIT %(batch)s
)
SELECT id, pg_try_advisory_xact_lock({class}, %(kind)s + id) FROM due
""")

READ = Statement("""
SELECT id, schedule, misfire, overlap, next_run_at, clock_timestamp()
FROM {schema}.actions
WHERE id = ANY (%(actions)s::int[]) AND next_run_at <= clock_timestamp() AND paused_at IS NULL
""")

# Usually no other transaction has locked one of these rows. Locking a thousand rows first would take 2 ms. So the first
# try does not; if it would have to wait for longer than this, it fails, and the second try reads `READ_UNLOCKED`.
LIMITED = Statement(f"{SHORT_IDLE}, set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true)")
READ_UNLOCKED = Statement(f"{READ} ORDER BY id FOR NO KEY UPDATE SKIP LOCKED")

ADVANCE = Statement("""
UPDATE {schema}.actions AS a
SET next_run_at = n.next
FROM unnest(%(actions)s::int[], %(were)s::timestamptz[], %(nexts)s::timestamptz[]) AS n (action_id, was, next)
WHERE a.id = n.action_id AND a.next_run_at = n.was
""")

NEXT_SLOT = Statement("""
SELECT min(next_run_at), clock_timestamp()
FROM {schema}.actions
WHERE id = ANY (%(actions)s::int[]) AND NOT (id = ANY (%(left)s::int[])) AND paused_at IS NULL
""")


class Scheduler(LoopService):
    name = "scheduler"

    def __init__(
        self,
        database: Database,
        member: Member,
        catalogue: Catalogue,
        lifecycle: Lifecycle,
        clock: ServerClock,
        on_rush: Callable[[bool], None] = lambda _: None,
        *,
        back_up: float = BACK_UP,
    ) -> None:
        """`on_rush` is called with True when more is due than one transaction takes, and with False afterwards."""
        super().__init__()
        self.scheduled = 0
        self._database = database
        self._sql = database.namespace.sql
        self._member = member
        self._catalogue = catalogue
        self._lifecycle = lifecycle
        self._clock = clock
        self._on_rush = on_rush
        self._back_up = back_up
        self._connection = database.dedicated()
        self._due: float | None = None
        # When to try again for actions that another transaction has locked.
        self._locked_retry = LOCKED_RETRY
        self._first = True
        self._wake = asyncio.Event()
        self._errors = LoopErrors(
            log, service="scheduler", defect="engine.defect", failed="scheduler.failed", retry_interval=RETRY
        )

    def expect(self, slot: datetime) -> None:
        """A slot is due at this time."""
        due = self._clock.loop_time(slot)
        if self._due is None or due < self._due:
            self._due = due
        self._wake.set()

    def schedule_now(self) -> None:
        """The instance has become the leader, or a schedule has changed."""
        self._due = 0.0
        self._wake.set()

    async def schedule_due(self) -> None:
        """Turn all due slots into runs, batch by batch, and read when the next slot is due."""
        loop = asyncio.get_running_loop()
        async with self._connection.connection() as connection:
            rush = False
            left: set[int] = set()
            try:
                while self._may_schedule():
                    due, left = await self._claim_due_without_waiting(connection)
                    if due < BATCH or len(left) == due:
                        break
                    rush = True
                    self._on_rush(rush)
            finally:
                if rush:
                    self._on_rush(False)
            asked = {"actions": array(self._catalogue.ids), "left": array(left)}
            answer = await connection.execute(self._sql(NEXT_SLOT), asked)
            row = await answer.fetchone()
        assert row is not None
        slot, server_now = row
        self._clock.learn(server_now, loop.time())
        if slot is not None:
            self.expect(slot)
        if left:
            again = loop.time() + self._locked_retry
            self._due = again if self._due is None else min(self._due, again)
            self._locked_retry = min(2 * self._locked_retry, MAX_LOCKED_RETRY)
        else:
            self._locked_retry = LOCKED_RETRY

    async def close(self) -> None:
        """Close the connection of a scheduler that was not started, and whose `schedule_due` was called."""
        await self._connection.close()

    async def _stop(self) -> None:
        await super()._stop()
        await self.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            behind = 0.0 if self._member.leading else self._back_up
            if self._due is None or not self._may_schedule():
                await wait_for_event(self._wake, None if self._may_schedule() else BACK_UP)
            elif (left := self._due + behind - loop.time()) > 0:
                await wait_for_event(self._wake, left)
            else:
                self._due = None
                async with self._errors.logged():
                    try:
                        await self.schedule_due()
                    except Exception:
                        self._due = loop.time()
                        raise

    def _may_schedule(self) -> bool:
        return not self._lifecycle.draining.is_set() and self._member.holds() and len(self._catalogue) > 0

    async def _claim_due_without_waiting(self, connection: Connection) -> tuple[int, set[int]]:
        try:
            return await self._claim_due(connection, LIMITED, READ)
        except psycopg.errors.LockNotAvailable:
            return await self._claim_due(connection, SHORT_IDLE, READ_UNLOCKED)

    async def _claim_due(
        self, connection: Connection, limits: Statement, read_again: Statement
    ) -> tuple[int, set[int]]:
        """Execute the transaction of the protocol; return how many actions were due, and which of them are left."""
        async with connection.transaction():
            await connection.execute(limits)
            asked = {"actions": array(self._catalogue.ids), "batch": BATCH, "kind": Lock.ACTION.key(0)}
            due = await (await connection.execute(self._sql(LOCK_DUE), asked)).fetchall()
            held = [identifier for identifier, taken in due if taken]
            rows: Sequence[tuple[Any, ...]] = []
            # The first time even without due actions: PostgreSQL plans the statements before a thousand are due.
            if held or self._first:
                self._first = False
                async with connection.cursor(binary=True) as cursor:
                    await cursor.execute(self._sql(read_again), {"actions": array(held)})
                    rows = await cursor.fetchall()
                await self._insert(connection, rows)
        return len(due), {identifier for identifier, _ in due}.difference([row[0] for row in rows])

    async def _insert(self, connection: Connection, due: Sequence[tuple[Any, ...]]) -> None:
        actions, slots, jitters, alone = [], [], [], []
        moved, were, nexts = [], [], []
        # Many of a thousand actions that are due at one moment have the same schedule.
        known: dict[tuple[str, str, datetime], tuple[Sequence[datetime], datetime]] = {}
        for identifier, schedule, misfire, overlap, next_run_at, now in due:
            # The options in the table count, not the options in this code: releases may be mixed.
            options = (schedule, misfire, next_run_at)
            if options not in known:
                known[options] = read(schedule).due(next_run_at, now, misfire)
            own, following = known[options]
            # With overlap="skip", several missed slots make one run: the second would find the first active.
            for slot in own[-1:] if overlap == "skip" else own:
                actions.append(identifier)
                slots.append(slot)
                jitters.append(read(schedule).jitter)
                alone.append(overlap == "skip")
            moved.append(identifier)
            were.append(next_run_at)
            nexts.append(following)
        runs = {"actions": array(actions), "slots": array(slots), "jitters": array(jitters), "alone": array(alone)}
        answer = await (await connection.execute(self._sql(INSERT_SLOTS), runs)).fetchone()
        advanced = {"actions": array(moved), "were": array(were), "nexts": array(nexts)}
        await connection.execute(self._sql(ADVANCE), advanced)
        assert answer is not None
        self.scheduled += answer[0]


@lru_cache(maxsize=10_000)
def read(schedule: str) -> Schedule:
    return Schedule.parse(schedule)
