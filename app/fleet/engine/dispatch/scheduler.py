"""The scheduler: a slot that is due becomes a run, once, whoever looks and however many look.

Claiming due actions is one transaction:

    1  pg_try_advisory_xact_lock for each      not taken: somebody else is at it, leave it alone; never wait
    2  read `next_run_at <= now()` again       under the lock, by a statement of its own: only now does it see what
                                               the one before us committed
    3  insert the runs, unique on the slot     the second belt: a slot that has a run makes no other
    4  move `next_run_at` on, if it is still
       what was read                           the third
    5  commit                                  which frees the lock

No statement here waits for another transaction for longer than 10 ms (`LIMITED`). An action whose row or lock another
transaction holds is left out, in 1 or 2, and tried again after `CONTENDED`, then less and less often; all other actions
are scheduled meanwhile. So a caller's transaction that is kept open delays the one action whose run it makes.

The lock is freed by the commit, and by then the table says what the lock said. Freed any earlier it would protect
nothing: the next instance would get it a millisecond later and find the action as due as before.

    the instance dies            before 5: nothing happened, the next one does it. After 5: the run is there
    it is frozen in between      the server ends its transaction after `SHORT_IDLE`, and the lock with it
    an error                     nothing happened; tried again

"Now" is PostgreSQL's, at both places; an instance's own clock is only used to wait.

The leader is punctual: it waits for the next slot. The others follow `BACK_UP` behind it, from what the reconciler
tells them, so that an idle cluster asks no more often for having more instances. An action is only scheduled by
instances whose code has it.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import psycopg

from app.fleet.background import Service, cancel_and_wait, wait_for_event
from app.fleet.cluster.member import Member
from app.fleet.db.namespace import Lock, Statement
from app.fleet.db.pool import Connection, Database
from app.fleet.db.statements import SHORT_IDLE, array
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.schedule import Schedule
from app.fleet.engine.dispatch.server_clock import ServerClock
from app.fleet.errors import DatabaseError
from app.fleet.lifecycle import Lifecycle
from app.fleet.runs.feed import feed_insert_sql
from app.fleet.runs.notifications import notify_sql
from app.fleet.runs.overlap import active_run
from app.fleet.telemetry.logs import events

BACK_UP = 1.0
# More than a thousand, so that a thousand are known to be all.
BATCH = 1024
RETRY = 0.1
AFTER_DEFECT = 1.0
# When to come back for actions that another transaction has locked: soon, and then half as often each time.
CONTENDED = 0.02
CONTENDED_MOST = 0.5

log = events(__name__)

# The first number of the lock is the namespace's, the second the action's (`db/namespace.py`). LIMIT before the lock:
# a lock is taken for every row the condition looks at.
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

# Nearly always no other transaction has locked one of these rows. To lock each of them first would take 2 ms for a
# thousand, so the first attempt does not: it fails if it has to wait for longer than this, and is made again with
# `READ_UNLOCKED`.
LIMITED = Statement(f"{SHORT_IDLE}, set_config('lock_timeout', '10', true)")
READ_UNLOCKED = Statement(f"{READ} ORDER BY id FOR NO KEY UPDATE SKIP LOCKED")

# Slots whose action is still busy with an earlier one are left out, if it wants it so.
INSERT_RUNS = Statement(f"""
WITH slots AS MATERIALIZED (
    SELECT *, 'slot:' || to_char(slot AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US') AS key
    FROM unnest(%(actions)s::int[], %(slots)s::timestamptz[], %(jitters)s::float8[], %(alone)s::bool[])
         AS s (action_id, slot, jitter, alone)
    WHERE NOT (alone AND {active_run("s.action_id")} IS NOT NULL)
), new AS (
    INSERT INTO {{schema}}.run_keys (action_id, key, run_id)
    SELECT action_id, key, nextval('{{schema}}.runs_id_seq')
    FROM slots
    ORDER BY action_id, slot
    ON CONFLICT DO NOTHING
    RETURNING action_id, key, run_id
), added AS (
    INSERT INTO {{schema}}.runs (id, action_id, priority, run_at, max_attempts, trigger, scheduled_for)
    SELECT n.run_id, s.action_id, a.priority, s.slot + make_interval(secs => s.jitter * random()), a.max_attempts,
           'schedule', s.slot
    FROM new AS n
    JOIN slots AS s ON s.action_id = n.action_id AND s.key = n.key
    JOIN {{schema}}.actions AS a ON a.id = s.action_id
    RETURNING id, action_id, priority, run_at, events, attempt, instance
), noted AS (
    {feed_insert_sql("added", "'pending'")}
), told AS (
    {notify_sql("added")}
)
SELECT (SELECT count(*) FROM added), (SELECT count(*) FROM told)
""")

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


class Scheduler(Service):
    name = "scheduler"

    def __init__(
        self,
        database: Database,
        member: Member,
        catalogue: Catalogue,
        lifecycle: Lifecycle,
        clock: ServerClock,
        on_rush: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`on_rush` is told when more is due than one transaction takes, and when it has been done."""
        super().__init__()
        self.scheduled = 0
        self._database = database
        self._sql = database.namespace.sql
        self._member = member
        self._catalogue = catalogue
        self._lifecycle = lifecycle
        self._clock = clock
        self._on_rush = on_rush
        self._lane = database.dedicated()
        self._due: float | None = None
        # How long to leave what another transaction has locked.
        self._patience = CONTENDED
        self._first = True
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def expect(self, slot: datetime) -> None:
        """A slot is due then, if not earlier ones."""
        due = self._clock.loop_time(slot)
        if self._due is None or due < self._due:
            self._due = due
        self._wake.set()

    def look_now(self) -> None:
        """Leadership came to us, or a schedule has changed."""
        self._due = 0.0
        self._wake.set()

    async def _start(self) -> None:
        self._task = asyncio.create_task(self._schedule_for_ever(), name="scheduler")

    async def _stop(self) -> None:
        await cancel_and_wait(self._task)
        await self._lane.close()

    async def _schedule_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            behind = 0.0 if self._member.leading else BACK_UP
            if self._due is None or not self._may_schedule():
                await wait_for_event(self._wake, None if self._may_schedule() else BACK_UP)
            elif (left := self._due + behind - loop.time()) > 0:
                await wait_for_event(self._wake, left)
            else:
                self._due = None
                try:
                    await self._schedule()
                except (psycopg.Error, DatabaseError) as error:
                    log.debug("scheduler.failed", reason=" ".join(str(error).split()))
                    self._due = loop.time()
                    await asyncio.sleep(RETRY)
                except Exception as error:  # noqa: BLE001 — a defect of ours must not end it for good
                    log.error("engine.defect", error=error, service="scheduler")
                    self._due = loop.time()
                    await asyncio.sleep(AFTER_DEFECT)

    def _may_schedule(self) -> bool:
        return not self._lifecycle.draining.is_set() and self._member.holds() and len(self._catalogue) > 0

    async def _schedule(self) -> None:
        """Claim everything that is due, batch by batch, and learn what is due next."""
        loop = asyncio.get_running_loop()
        async with self._lane.connection() as connection:
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
            again = loop.time() + self._patience
            self._due = again if self._due is None else min(self._due, again)
            self._patience = min(2 * self._patience, CONTENDED_MOST)
        else:
            self._patience = CONTENDED

    async def _claim_due_without_waiting(self, connection: Connection) -> tuple[int, set[int]]:
        try:
            return await self._claim_due(connection, LIMITED, READ)
        except psycopg.errors.LockNotAvailable:
            return await self._claim_due(connection, SHORT_IDLE, READ_UNLOCKED)

    async def _claim_due(
        self, connection: Connection, limits: Statement, read_again: Statement
    ) -> tuple[int, set[int]]:
        """One transaction of the protocol above. Returns how many were due, and which of them are left."""
        async with connection.transaction():
            await connection.execute(limits)
            asked = {"actions": array(self._catalogue.ids), "batch": BATCH, "kind": Lock.ACTION.key(0)}
            due = await (await connection.execute(self._sql(LOCK_DUE), asked)).fetchall()
            held = [identifier for identifier, taken in due if taken]
            rows: Sequence[tuple[Any, ...]] = []
            # The first time with nothing too, so that the plans are there when a thousand are due.
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
        # Of a thousand that are due in one moment, many have the same schedule.
        known: dict[tuple[str, str, datetime], tuple[Sequence[datetime], datetime]] = {}
        for identifier, schedule, misfire, overlap, next_run_at, now in due:
            # By the database's words, whatever our code says: releases may be mixed.
            alike = (schedule, misfire, next_run_at)
            if alike not in known:
                known[alike] = read(schedule).due(next_run_at, now, misfire)
            own, following = known[alike]
            # With overlap="skip", several missed slots are one: the second would find the first active.
            for slot in own[-1:] if overlap == "skip" else own:
                actions.append(identifier)
                slots.append(slot)
                jitters.append(read(schedule).jitter)
                alone.append(overlap == "skip")
            moved.append(identifier)
            were.append(next_run_at)
            nexts.append(following)
        runs = {"actions": array(actions), "slots": array(slots), "jitters": array(jitters), "alone": array(alone)}
        answer = await (await connection.execute(self._sql(INSERT_RUNS), runs)).fetchone()
        advanced = {"actions": array(moved), "were": array(were), "nexts": array(nexts)}
        await connection.execute(self._sql(ADVANCE), advanced)
        assert answer is not None
        self.scheduled += answer[0]


@lru_cache(maxsize=10_000)
def read(schedule: str) -> Schedule:
    return Schedule.parse(schedule)
