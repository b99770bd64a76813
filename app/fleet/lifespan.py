"""Start-up and ordered shutdown of an instance, each as a list of steps.

The shutdown begins at the signal, not at the lifespan's end: uvicorn closes its listener within 100 ms of SIGTERM, and
load balancers that have not noticed by then still send requests to it. So a signal handler (`server/signals.py`) starts
the shutdown, which waits while the listener is still open and only then passes the signal on to uvicorn.

    signal, or `flotilla down`           1 flag        readiness is 503; leadership and singletons pass to others;
                                                       streams end
      wait for DRAIN_DELAY               2 drain       the listener is still open; load balancers notice
      uvicorn receives the signal        .             the listener is closed; requests in flight finish
    lifespan's end                       3 scheduler
                                         4 executor
                                         5 resources   what `app/startup.py` has opened is closed, in reverse order
                                         6 unlink      the instance's row is gone, its presence lock is free
                                         7 pool        the last step: until here, everything can still write

A second signal skips the wait; a third goes to uvicorn alone. A step that exceeds its limit is cancelled and logged,
and the next step begins. The duration of every step is logged and stored in the instance's row: the link writes the
steps so far when one begins and with each heartbeat, and no step waits for that.

A watchdog thread ends the process before the platform would, so that the log has the reason. The watchdog stays active
after the last step: a thread that never ends would keep the process alive, and a process with PID 1 ignores the signal
that uvicorn sends to itself at its end.

No invariant depends on the shutdown: after SIGKILL at any instruction, the leader cleans up what is left.
"""

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from app.fleet.background import Service, wait_for_event
from app.fleet.cluster.command_audit import log_commands
from app.fleet.cluster.member import Member
from app.fleet.coordination.coordination import Coordination
from app.fleet.db import dsn, migrations, preflight
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Database
from app.fleet.edge.context import Context, Services
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.engine import Engine
from app.fleet.errors import FleetError
from app.fleet.lifecycle import Phase
from app.fleet.server.signals import Signals
from app.fleet.settings import WATCHDOG_RESERVE, FleetSettings
from app.fleet.stream.stream import Stream
from app.fleet.telemetry.logs import event_log

log = event_log(__name__)

EXIT_WATCHDOG = 70
DRAIN_SLACK = 2.0
RECORD_LIMIT = 2.0


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: Context = app.state.fleet
    signals = Signals()
    started: list[Service] = []
    try:
        services = await start_up(context, signals, started)
    except BaseException as error:
        if isinstance(error, FleetError):
            context.start_error = error
        for service in reversed(started):
            await service.stop()
        raise
    shutdown = Shutdown(context, signals, services)
    signals.install(shutdown.begin, drain_timeout=context.settings.drain_timeout)
    signals.server.keep_peers()
    signals.server.limit_clients(context.settings, context.connections, is_open=not context.protected)
    try:
        yield
    finally:
        await shutdown.finish()
        signals.restore()


# -- start-up ---------------------------------------------------------------------------------------------------------


async def start_up(context: Context, signals: Signals, started: list[Service]) -> Services:
    """Start the services in their order, and add each to `started` first.

    Pool, migrations, link, actions, coordination, streams, the resources of the service, engine, singletons.
    """
    settings = context.settings
    namespace = Namespace(settings.namespace)
    began = time.monotonic()

    async def start(service: Service) -> None:
        started.append(service)
        await service.start()

    catalogue = Catalogue.load(settings.actions)
    addresses = await checked_addresses(settings)

    database = Database(settings, addresses, namespace)
    await start(database)
    await asyncio.to_thread(
        migrations.ensure_current,
        addresses.direct,
        namespace,
        allowed=settings.migrates_on_start,
        wait=settings.migrate_wait,
        should_stop=signals.server.is_stopping,
    )

    port = signals.server.port or settings.port
    member = Member(settings, addresses, namespace, database, version=context.version, port=port, on_leave=leave)
    # Created before the member joins: an instance that declares others gone must also release their runs and locks.
    coordination = Coordination(database, member)
    log_commands(member)
    stream = Stream(database, member)
    engine = Engine(settings, database, member, catalogue, context.lifecycle, stream, coordination)
    await start(member)

    await engine.synchronise()
    if settings.role.executes:
        coordination.singletons.declare(catalogue.singletons)
    resources = context.resources
    resources.enter()
    for service in (
        *coordination.services, *stream.services, resources, *engine.services, coordination.singletons,
    ):  # fmt: skip
        await start(service)

    services = Services(database, member, coordination, stream, engine)
    context.start(services)
    if signals.server.runs_this_process:
        # The objects that exist now are kept for ever; a full collection over them would block the event loop for long.
        gc.collect()
        gc.freeze()
    # The instance's row before the probes: a client that has seen 200 from a probe finds the row ready too.
    await member.announce(Phase.READY)
    await engine.notify_members()
    context.lifecycle.ready()
    log.info(
        "instance.ready",
        role=settings.role.value,
        port=port,
        seconds=round(time.monotonic() - began, 2),
        database=addresses.location,
    )
    return services


async def checked_addresses(settings: FleetSettings) -> dsn.Addresses:
    """Return the addresses of the database, after a check of what can be reached there."""
    addresses = await asyncio.to_thread(dsn.resolve, settings)
    await asyncio.to_thread(preflight.check_direct, addresses)
    route = await asyncio.to_thread(preflight.check_pool, addresses)
    for place in route.unencrypted:
        log.warning("database.unencrypted", database=place)
    return addresses


def leave(reason: str) -> None:
    """Begin the ordered shutdown from inside, by the same signal as from outside: there is only one way to end."""
    log.info("instance.leaving", reason=reason)
    os.kill(os.getpid(), signal.SIGTERM)


# -- shutdown ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    name: str
    work: Callable[[], Awaitable[object]]
    limit: float


class Shutdown:
    """The ordered shutdown of one instance. It runs once, started by a signal or by the lifespan's end."""

    def __init__(self, context: Context, signals: Signals, services: Services) -> None:
        settings = context.settings
        self._context = context
        self._signals = signals
        self._services = services
        self._delay = 0.0 if signals.server.reloading else settings.drain_delay_seconds
        self._grace = settings.grace_period - WATCHDOG_RESERVE
        self._skip_delay = asyncio.Event()
        self._server_done = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._finished = False
        self._step_began = 0.0
        self.record: list[dict[str, Any]] = []
        # The settings reserve `STEPS_RESERVE` for the sum of the fixed limits and of the final record's.
        self.steps = [
            Step("flag", self._raise_flag, limit=1.0),
            Step("drain", self._drain, limit=self._delay + settings.drain_timeout + DRAIN_SLACK),
            Step("scheduler", services.engine.scheduler.stop, limit=2.0),
            Step("executor", self._pause, limit=settings.pause_timeout),
            Step("resources", context.resources.stop, limit=3.0),
            Step("unlink", services.member.stop, limit=4.0),
            Step("pool", services.database.stop, limit=3.0),
        ]

    def begin(self) -> None:
        """Start the shutdown, at the signal. A second call skips the wait."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="shutdown")
        else:
            self._skip_delay.set()

    async def finish(self) -> None:
        """Complete the shutdown, at the lifespan's end: uvicorn has closed its listener and its connections."""
        self._server_done.set()
        self._skip_delay.set()
        if self._task is None:
            self.begin()
        assert self._task is not None
        await self._task

    async def _run(self) -> None:
        watchdog = threading.Timer(self._grace, self._end_process)
        watchdog.daemon = True
        watchdog.start()
        began = time.monotonic()
        member = self._services.member
        member.keep_record(self.recorded)
        for step in self.steps:
            await self._run_step(step)
        with suppress(TimeoutError):
            async with asyncio.timeout(RECORD_LIMIT):
                await member.write_final_record()
        self._finished = True
        if not self._signals.received:
            # uvicorn ended by itself, inside a program that may go on, such as a test.
            watchdog.cancel()
        log.info("shutdown.finished", seconds=round(time.monotonic() - began, 3))

    async def _run_step(self, step: Step) -> None:
        """Run a step within its limit, and record its duration and outcome."""
        began = self._step_began = time.monotonic()
        entry = {"step": step.name, "ms": 0.0, "outcome": "running"}
        self.record.append(entry)
        self._services.member.hasten_heartbeat()
        task = asyncio.ensure_future(step.work())
        done, _ = await asyncio.wait({task}, timeout=step.limit)
        seconds = time.monotonic() - began
        error = None
        if not done:
            # Not awaited: a step that exceeds its limit may not end when it is cancelled either.
            task.cancel()
            outcome = "cut"
        elif error := task.exception():
            outcome = "failed"
        else:
            outcome = "done"
        entry |= {"ms": round(seconds * 1000, 1), "outcome": outcome}
        self._context.shutdown_seconds[step.name] = seconds
        if outcome == "done":
            log.info("shutdown.step", **entry)
        else:
            log.error("shutdown.step", error=error, limit=step.limit, **entry)

    def recorded(self) -> list[dict[str, Any]]:
        """Return the steps so far; the duration of the running one is the time until now. Any thread may call this."""
        so_far = {"ms": round((time.monotonic() - self._step_began) * 1000, 1)}
        return [each | (so_far if each["outcome"] == "running" else {}) for each in list(self.record)]

    async def _raise_flag(self) -> None:
        self._context.lifecycle.drain("this instance is shutting down")
        # In this order, so that the rows never show an instance that gives up leadership and is not draining.
        await self._services.member.announce(Phase.DRAINING)
        self._services.member.step_down()
        await self._services.coordination.singletons.stop()

    async def _drain(self) -> None:
        """Wait for load balancers to notice, let uvicorn close its listener, and wait for the last request."""
        await wait_for_event(self._skip_delay, self._delay)
        self._signals.hand_over()
        await self._server_done.wait()
        while self._context.in_flight:  # noqa: ASYNC110 — cheaper than an event that every request would set
            await asyncio.sleep(0.02)

    async def _pause(self) -> None:
        await self._services.engine.pause()
        await self._services.stream.stop()
        for service in reversed(self._services.coordination.services):
            await service.stop()
        # After all attempts have ended, and last: in an outage, this may take the rest of the step.
        await self._services.engine.minutes.stop()

    def _end_process(self) -> None:
        """End the process before the platform does, which would log no reason. Called in the watchdog's thread."""
        step = "exit" if self._finished else self.record[-1]["step"] if self.record else "none"
        log.error("shutdown.watchdog", seconds=self._grace, step=step)
        os._exit(EXIT_WATCHDOG)
