"""The worker of a test: another instance in the test process, which executes the attempts, and can die.

It has its own pool, its own link, its own row among the instances, and its own executor and run writer, all of them
real. It claims only when the test executes runs, with the statements of every claim.

    a death                                         is
    the attempt stops                               frozen at a point (`faults.py`)
    what its run writer has not written             forgotten
    its open transactions                           rolled back: PostgreSQL ends the sessions of its pool
    its presence, its locks, its keys of `once`     released by the transaction that marks its row gone, and which
    its runs                                        rescues its runs, by the same hooks as at a real death
    its process                                     only this object: what it holds in memory stays until the test ends

The order is the one of this table: a transaction that were still open would keep its run from being rescued.

To overtake an attempt, the worker loses its row, as if it were cut off, while the attempt and its sessions go on.
"""

import asyncio
import contextvars
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

from sqlalchemy import event
from sqlalchemy.util import await_only

from app.fleet.cluster.member import Member
from app.fleet.coordination.coordination import Coordination
from app.fleet.db.dsn import pool_application, resolve
from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Database
from app.fleet.db.pool.statements import Place
from app.fleet.db.server_clock import ServerClock
from app.fleet.edge.context import Context
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.run import Run
from app.fleet.engine.dispatch.backlog import Backlog
from app.fleet.engine.dispatch.claimant import Claimant
from app.fleet.engine.engine import Engine
from app.fleet.engine.enqueue.insert import Triggered
from app.fleet.engine.enqueue.trigger import Triggers
from app.fleet.engine.execute.attempt import Attempt
from app.fleet.engine.execute.failures import usual_delay
from app.fleet.engine.maintenance import rescuer
from app.fleet.errors import EngineError
from app.fleet.lifecycle import Lifecycle
from app.fleet.role import Role
from app.fleet.runs.claim import Row
from app.fleet.runs.effects.notifications import QUEUE_PRIORITY
from app.fleet.runs.read.records import Trigger
from app.fleet.stream.stream import Stream
from app.fleet.testing.faults import Fault, Mortal, Watch, WatchedAttempt, current_watch, watch_tasks
from app.fleet.testing.stored import read_runs

Answer = TypeVar("Answer")

# The executor says nothing when a slot becomes free, so it is looked at.
LOOK_INTERVAL = 0.002
# How long the pool of a dead worker may take to close, and PostgreSQL to end a session, in seconds.
CLOSE_TIMEOUT = 2.0
# How long a rescue is tried, in seconds: another session may have locked the row for a moment.
RESCUE_TIMEOUT = 5.0

QUEUES = Statement(f"""
SELECT action_id, {QUEUE_PRIORITY}, min(run_at), clock_timestamp()
FROM {{schema}}.runs
WHERE state = 'pending' AND (%(id)s::int8 IS NULL OR id = %(id)s)
GROUP BY 1, 2
""")
# A claim leaves out what another session has locked, so it finds the one run that is left.
LOCK_OTHERS = Statement("""
SELECT id FROM {schema}.runs WHERE state = 'pending' AND id <> %(id)s FOR UPDATE SKIP LOCKED
""")
END_SESSIONS = Statement("""
SELECT pg_terminate_backend(pid, %(milliseconds)s)
FROM pg_catalog.pg_stat_activity
WHERE application_name = %(name)s AND datname = current_database()
""")


class WatchedTriggers(Triggers):
    """Triggers in a transaction of their own are points."""

    async def trigger(
        self, orders: Any, session: Place | None = None, *, by: Trigger = "code", mark: str | None = None
    ) -> list[Triggered]:
        if session is None and orders and (watch := current_watch.get()):
            await watch.reach("trigger")
        return await super().trigger(orders, session, by=by, mark=mark)


class Worker:
    def __init__(self, main: Context) -> None:
        settings = main.settings.model_copy(
            update={"role": Role.WORKER, "pool_min": 1, "pause_timeout": 0.2, "instance_name": None, "workspace": None}
        )
        addresses = resolve(settings)
        self._main = main
        self._namespace = main.database.namespace
        self.database = Database(settings, addresses, self._namespace)
        self.member = Member(
            settings,
            addresses,
            self._namespace,
            self.database,
            version=main.version,
            port=None,
            on_leave=lambda _: None,
        )
        self._coordination = Coordination(self.database, self.member)
        self._stream = Stream(self.database, self.member)
        self._catalogue = Catalogue({each.name: self._watched(each) for each in main.engine.catalogue})
        self._catalogue.set_ids({each.name: main.engine.catalogue.id_of(each.name) for each in main.engine.catalogue})
        self._engine = Engine(
            settings, self.database, self.member, self._catalogue, Lifecycle(), self._stream, self._coordination
        )
        self._remove_spread()
        self._engine.triggers = WatchedTriggers(self.database, self._catalogue, self._stream.hub)
        # In this context, `trigger`, `once` and `lock` mean this worker.
        self._context = contextvars.copy_context()
        self._watches: dict[int, Watch] = {}
        self._left = self._dead = False

    async def start(self) -> None:
        await self._within(self._start())

    async def _start(self) -> None:
        await self.database.start()
        event.listen(self.database.engine.sync_engine, "commit", self._before_commit)
        await self.member.start()
        self._engine.enter()
        for service in (*self._coordination.services, *self._stream.services, self._engine.executor):
            await service.start()
        watch_tasks(asyncio.get_running_loop())

    async def close(self) -> None:
        """Stop in order, or, after a death, let what is frozen end."""
        if self._dead:
            for attempt in list(self._engine.executor.attempts.values()):
                self._engine.executor.stop_fenced(attempt)
            for watch in self._watches.values():
                await watch.release()
        await self._engine.executor.stop()
        if not self._dead:
            await self._stop_services()
            await self.leave()
            await self.database.stop()

    # -- claims and attempts ------------------------------------------------------------------------------------------

    async def claim(self, run_id: int | None = None) -> Row | None:
        """Claim this run, or the run that comes first; None if it cannot be claimed now."""
        identity = self.member.identity
        assert identity is not None
        clock = ServerClock()
        backlog = Backlog(self._catalogue, clock)
        claimant = Claimant(self._namespace, self._catalogue, backlog, clock)
        sql = self._namespace.sql
        async with AsyncExitStack() as stack:
            if run_id is not None:
                others = await stack.enter_async_context(self._main.database.connection())
                await others.execute(sql(LOCK_OTHERS), {"id": run_id})
            connection = await stack.enter_async_context(self.database.autocommit())
            queues = await (await connection.execute(sql(QUEUES), {"id": run_id})).fetchall()
            now = asyncio.get_running_loop().time()
            for action_id, priority, run_at, server_now in queues:
                clock.learn(server_now, now)
                backlog.add(action_id, priority, run_at, now)
            rows = await claimant.claim(connection, identity, backlog.due(now), 1, now)
        return rows[0] if rows else None

    def begin(self, row: Row, fault: Fault | None) -> Watch:
        """Begin the attempt of a claimed run."""
        run_id = cast("int", row[0])
        watch = self._watches[run_id] = Watch(fault)
        self._context.run(self._engine.executor.begin, row)
        return watch

    async def until_ended(self, row: Row) -> None:
        """Wait until the end of the attempt is written, or needs not be."""
        run_id, token = row[0], row[2]
        while self._engine.executor.owns(run_id, token):  # noqa: ASYNC110 — the executor has no event for it
            await asyncio.sleep(LOOK_INTERVAL)

    # -- faults -------------------------------------------------------------------------------------------------------

    async def die(self, run_id: int) -> None:
        """Die, with an attempt that is frozen, and have its run rescued."""
        self._dead = True
        await self._engine.executor.writer.stop()
        await self._stop_services()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self.database.stop()
        values = {"name": pool_application(self._namespace, self.database.run_id)}
        async with self._main.database.autocommit() as connection:
            milliseconds = int(CLOSE_TIMEOUT * 1000)
            await connection.execute(self._namespace.sql(END_SESSIONS), {**values, "milliseconds": milliseconds})
        await self.lose(run_id)

    async def lose(self, run_id: int) -> None:
        """Lose the row and everything that is held under it, this run among it."""
        instance = self.member.identity
        assert instance is not None
        await self.leave()
        deadline = time.monotonic() + RESCUE_TIMEOUT
        while time.monotonic() < deadline:
            (run,) = await read_runs(self._main.database, [run_id])
            if run.state != "running" or run.instance != instance.name:
                return
            async with self._main.database.autocommit() as connection:
                await rescuer.sweep(connection, self._namespace, overdue=False)
            await asyncio.sleep(LOOK_INTERVAL)
        raise EngineError(
            f"run {run_id} cannot be taken over at this point: a transaction of its action has locked the row of the "
            f"run, as `run.guard` does until it commits"
        )

    async def leave(self) -> None:
        if not self._left:
            self._left = True
            await self.member.stop()

    # -- the actions --------------------------------------------------------------------------------------------------

    def _watched(self, action: Action[Any]) -> Action[Any]:
        """Return the action with a handler that is followed through its points."""

        async def handle(run: Run[Any]) -> Any:
            watch = self._watches[run.id]
            current_watch.set(watch)
            return await Mortal(follow(handle_of(run, watch), watch), watch)

        async def follow(run: Run[Any], watch: Watch) -> Any:
            await watch.reach("start")
            value = await action.handler(run)
            await watch.reach("return")
            return value

        def handle_in_thread(run: Run[Any]) -> Any:
            watch = self._watches[run.id]
            current_watch.set(watch)
            attempt = run._attempt  # noqa: SLF001 — the kit is behind the handle, as the engine is
            attempt.wait_from_thread(watch.reach("start"))
            value = action.handler(handle_of(run, watch))
            attempt.wait_from_thread(watch.reach("return"))
            return value

        return replace(action, handler=handle_in_thread if action.blocking else handle)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _remove_spread(self) -> None:
        """The delay of a retry has a random part, which a test cannot know: write the delay without it."""
        writer = self._engine.executor.writer
        retry = writer.retry

        def retry_exactly(attempt: Attempt, delay: float | None, error: str) -> None:
            retry(attempt, usual_delay(attempt) if delay is None else delay, error)

        writer.retry = retry_exactly  # type: ignore[method-assign]

    def _before_commit(self, _: Any) -> None:
        """Called by SQLAlchemy before each commit. `run.commit` has its own points."""
        watch = current_watch.get()
        if watch is not None and not watch.in_commit:
            await_only(watch.reach("transaction"))

    async def _stop_services(self) -> None:
        await self._stream.stop()
        for service in reversed(self._coordination.services):
            await service.stop()

    async def _within(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return await asyncio.get_running_loop().create_task(work, context=self._context)


def handle_of(run: Run[Any], watch: Watch) -> Run[Any]:
    return Run(cast("Any", WatchedAttempt(run._attempt, watch)))  # noqa: SLF001 — as above
