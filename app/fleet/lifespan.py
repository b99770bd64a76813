"""Start-up, and the ordered shutdown, each readable top to bottom.

The shutdown begins at the signal and not at the lifespan's end: uvicorn closes its listener within 100 ms of SIGTERM
and runs the lifespan's end only after the last connection, and a load balancer that has not noticed by then sends its
requests into nothing. So start-up puts a handler before uvicorn's. It raises the flag, waits while the listener is
still open, and only then lets uvicorn have the signal. This is the same under plain `uvicorn app.main:app`, in each
process of `--workers N`, and under `flotilla serve`.

    signal, or `flotilla down`           1 flag        readiness 503, leadership and singletons handed on, streams told
                                                       to end
      wait DRAIN_DELAY                   2 drain       listener still open; load balancers notice
      uvicorn has the signal             .             listener closed; requests in flight finish
    lifespan's end                       3 scheduler
                                         4 executor
                                         5 unlink      row gone, presence lock free
                                         6 pool        last: until here, everything can still write

A second signal skips the wait; a third is uvicorn's alone. A step that takes longer than its limit is cut, said in the
log, and the next begins. Every step's duration is in the log and in the instance's row. A watchdog thread ends the
process before the platform would, so that the log says why. It goes on after the last step: a thread that never ends
keeps the interpreter from ending, and as PID 1 the process ignores the signal that the server sends itself at its end.

Nothing safe depends on any of this running: SIGKILL at any point leaves only what the leader cleans up.
"""

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from app.fleet.background import Service, wait_for_event
from app.fleet.cluster.commands import log_commands
from app.fleet.cluster.member import Member
from app.fleet.coordination.coordination import Coordination
from app.fleet.db import dsn, migrations, preflight
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool import Database
from app.fleet.engine.actions.action import Catalogue
from app.fleet.engine.engine import Engine
from app.fleet.errors import FleetError
from app.fleet.http.edge.context import Context
from app.fleet.lifecycle import Phase
from app.fleet.server.signals import Signals
from app.fleet.settings import WATCHDOG_RESERVE
from app.fleet.stream.stream import Stream
from app.fleet.telemetry.logs import events

log = events(__name__)

EXIT_WATCHDOG = 70
DRAIN_SLACK = 2.0
RECORD_LIMIT = 2.0


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: Context = app.state.fleet
    signals = Signals()
    services: list[Service] = []
    try:
        shutdown = await start_up(context, signals, services)
    except FleetError as error:
        context.refused = error
        await undo(services)
        raise
    except BaseException:
        await undo(services)
        raise
    signals.install(shutdown.begin, drain_timeout=context.settings.drain_timeout)
    signals.server.limit_clients(context.settings, context.connections)
    try:
        yield
    finally:
        await shutdown.finish()
        signals.restore()


async def start_up(context: Context, signals: Signals, services: list[Service]) -> "Shutdown":
    """Settings were checked when they were read. From here: pool, migrations, link, actions, services."""
    settings = context.settings
    namespace = Namespace(settings.namespace)
    began = time.monotonic()

    catalogue = Catalogue.load(settings.actions)
    addresses = await asyncio.to_thread(dsn.resolve, settings)
    await asyncio.to_thread(preflight.check_direct, addresses)
    route = await asyncio.to_thread(preflight.check_pool, addresses)
    for place in route.unencrypted:
        log.warning("database.unencrypted", database=place)

    database = Database(settings, addresses, namespace)
    services.append(database)
    await database.start()

    await asyncio.to_thread(
        migrations.ensure_current,
        addresses.direct,
        namespace,
        allowed=settings.migrates_on_start,
        wait=settings.migrate_wait,
        given_up=signals.server.is_stopping,
    )

    port = signals.server.port or settings.port
    member = Member(
        settings,
        addresses,
        namespace,
        database,
        version=context.version,
        port=port,
        on_leave=leave,
    )
    # Before it joins: whoever declares somebody gone must know what that means for runs and locks.
    shared = Coordination(database, member)
    log_commands(member)
    stream = Stream(database, member)
    engine = Engine(settings, database, member, catalogue, context.lifecycle, stream, shared)
    services.append(member)
    await member.start()

    await engine.synchronise()
    shared.singletons.declare(catalogue.singletons)
    for service in (*shared.services, *stream.services, *engine.services, shared.singletons):
        services.append(service)
        await service.start()

    context.started(database, member, shared, stream, engine)
    if signals.server.runs_this_process:
        # What is there now stays; a full collection that walked through it would hold the event loop up for long.
        gc.collect()
        gc.freeze()
    # The register first: who is told "ready" by a probe finds it there.
    await member.announce(Phase.READY)
    await engine.tell_members()
    context.lifecycle.ready()
    log.info("instance.ready", port=port, seconds=round(time.monotonic() - began, 2), database=addresses.place)
    return Shutdown(context, signals, database=database, member=member, shared=shared, stream=stream, engine=engine)


async def undo(services: Sequence[Service]) -> None:
    """Stop what a start-up had started when it was refused or failed."""
    for service in reversed(services):
        await service.stop()


def leave(reason: str) -> None:
    """End this instance in order. The signal is the one way in, so that there is one way out."""
    log.info("instance.leaving", reason=reason)
    os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Step:
    name: str
    work: Callable[[], Awaitable[object]]
    limit: float


class Shutdown:
    """The ordered shutdown of one instance, run once, by a signal or by the lifespan's end."""

    def __init__(
        self,
        context: Context,
        signals: Signals,
        *,
        database: Database,
        member: Member,
        shared: Coordination,
        stream: Stream,
        engine: Engine,
    ) -> None:
        settings = context.settings
        self._context = context
        self._signals = signals
        self._member = member
        self._shared = shared
        self._stream = stream
        self._engine = engine
        self._delay = 0.0 if signals.server.reloading else settings.drain_delay_seconds
        self._grace = settings.grace_period - WATCHDOG_RESERVE
        self._skip = asyncio.Event()
        self._server_done = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._finished = False
        self.record: list[dict[str, Any]] = []
        # Their limits, and the final record's, add up to what the settings keep for them (`STEPS_RESERVE`).
        self.steps = [
            Step("flag", self._raise_flag, limit=1.0),
            Step("drain", self._drain, limit=self._delay + settings.drain_timeout + DRAIN_SLACK),
            Step("scheduler", engine.scheduler.stop, limit=2.0),
            Step("executor", self._pause, limit=settings.pause_timeout),
            Step("unlink", member.stop, limit=4.0),
            Step("pool", database.stop, limit=3.0),
        ]

    def begin(self) -> None:
        """Start, at the signal. Called again: skip the wait."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="shutdown")
        else:
            self._skip.set()

    async def finish(self) -> None:
        """Go on to the end, at the lifespan's end: the server has closed its listener and its connections."""
        self._server_done.set()
        self._skip.set()
        if self._task is None:
            self.begin()
        assert self._task is not None
        await self._task

    async def _run(self) -> None:
        watchdog = threading.Timer(self._grace, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        began = time.monotonic()
        self._member.keep_record(self.record)
        for step in self.steps:
            await self._take(step)
        with suppress(TimeoutError):
            async with asyncio.timeout(RECORD_LIMIT):
                await self._member.write_final_record()
        self._finished = True
        if not self._signals.received:
            # The server ended by itself, inside of a program that may go on: a test, for example.
            watchdog.cancel()
        log.info("shutdown.finished", seconds=round(time.monotonic() - began, 3))

    async def _take(self, step: Step) -> None:
        """Do one step within its limit, and write down how it went."""
        began = time.monotonic()
        entry = {"step": step.name, "ms": 0.0, "outcome": "running"}
        self.record.append(entry)
        working = asyncio.ensure_future(step.work())
        done, _ = await asyncio.wait({working}, timeout=step.limit)
        seconds = time.monotonic() - began
        error = None
        if not done:
            # Not awaited: what does not end in time may not end when cancelled either.
            working.cancel()
            outcome = "cut"
        elif error := working.exception():
            outcome = "failed"
        else:
            outcome = "done"
        entry |= {"ms": round(seconds * 1000, 1), "outcome": outcome}
        self._context.shutdown_seconds[step.name] = seconds
        if outcome == "done":
            log.info("shutdown.step", **entry)
        else:
            log.error("shutdown.step", error=error, limit=step.limit, **entry)

    async def _raise_flag(self) -> None:
        self._context.lifecycle.drain("this instance is shutting down")
        # In this order, so that nobody sees a leader hand over who is not said to be leaving.
        await self._member.announce(Phase.DRAINING)
        self._member.step_down()
        await self._shared.singletons.stop()

    async def _pause(self) -> None:
        await self._engine.pause()
        await self._stream.stop()
        for service in reversed(self._shared.services):
            await service.stop()

    async def _drain(self) -> None:
        """Wait for load balancers to notice, let the server close its listener, and see the last request out."""
        await wait_for_event(self._skip, self._delay)
        self._signals.hand_over()
        await self._server_done.wait()
        while self._context.in_flight:  # noqa: ASYNC110 — cheaper looked at here than announced by every request
            await asyncio.sleep(0.02)

    def _give_up(self) -> None:
        """End the process: the platform is about to, and would not say why. Called in the watchdog's thread."""
        step = "exit" if self._finished else self.record[-1]["step"] if self.record else "none"
        log.error("shutdown.watchdog", seconds=self._grace, step=step)
        os._exit(EXIT_WATCHDOG)
