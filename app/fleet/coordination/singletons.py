"""Singletons: a function that runs on exactly one instance, for as long as that instance runs.

    @singleton("halts-monitor")
    async def halts_monitor(held: HeldLock) -> None:
        while True:
            …
            await asyncio.sleep(10)

Each instance whose code declares the singleton waits for the lock `singleton:<name>`, and runs the function while it
holds the lock. So a singleton has what a lock has (`locks/lock.py`): a token, `held.guard(session)`, and cancellation
when the lock is lost. In each of these cases, the instance that has waited longest runs the function next:

    event                       the next instance begins
    the instance drains         when the function has ended: it is cancelled, and its lock is released. If it ignores
                                the cancellation, it keeps the lock until the process ends
    the instance is killed      when it is declared gone, in a fraction of a second
    the instance is frozen or   when it is declared gone, or after `TTL`
    cut off
    the function returns        at once; this instance queues again after `PAUSE`
    the function raises         at once; this instance queues again after `PAUSE`, doubled after each failure in a row
                                up to `MAX_PAUSE`

Not guaranteed: that the function runs at every moment, nor that a function which ignores its cancellation has stopped.
Guard effects that must not happen twice.
"""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import psycopg

from app.fleet.background import Service, detach
from app.fleet.coordination.locks.held import RESERVED, HeldLock, LockRequest
from app.fleet.coordination.locks.lock import Locks
from app.fleet.errors import ActionInvalid, DatabaseError, LockLost
from app.fleet.telemetry.logs import event_log, request_id

NAME = re.compile(r"[a-z][a-z0-9._-]{0,99}")
TTL = 5.0
PAUSE = 1.0
MAX_PAUSE = 60.0
# How long a function may take to end when its instance drains.
STOP_TIMEOUT = 0.4

log = event_log(__name__)

Handler = Callable[[HeldLock], Awaitable[None]]


@dataclass(frozen=True)
class Singleton:
    """A named function that one instance runs: the result of `@singleton`."""

    name: str
    handler: Handler

    def __call__(self, held: HeldLock) -> Awaitable[None]:
        return self.handler(held)

    @property
    def location(self) -> str:
        return f"{self.handler.__module__}.{self.handler.__qualname__}"


def singleton(name: str) -> Callable[[Handler], Singleton]:
    """Declare an async function as a singleton. It is found in the modules of `FLOTILLA_ACTIONS`."""

    def declare(handler: Handler) -> Singleton:
        where = f"the singleton {name!r} ({handler.__module__}.{handler.__qualname__}) is declared wrongly"
        if not NAME.fullmatch(name):
            raise ActionInvalid(
                f"{where}: a name is a lower-case letter, then up to 99 lower-case letters, digits, dots, hyphens and "
                f"underscores"
            )
        if not inspect.iscoroutinefunction(handler) or len(inspect.signature(handler).parameters) != 1:
            raise ActionInvalid(f"{where}: it must be an async function of the lock: `async def name(held: HeldLock)`")
        return Singleton(name, handler)

    return declare


class Singletons(Service):
    name = "singletons"

    def __init__(self, locks: Locks) -> None:
        super().__init__()
        self._locks = locks
        self._declared: Sequence[Singleton] = ()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def declare(self, declared: Sequence[Singleton]) -> None:
        """Set the singletons of this instance, before the start."""
        self._declared = declared

    async def _start(self) -> None:
        self._tasks = {
            each.name: asyncio.create_task(self._run_whenever_held(each), name=f"singleton-{each.name}")
            for each in self._declared
        }

    async def _stop(self) -> None:
        """Cancel the singletons that run here, and do not wait for their locks again: this instance drains."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=STOP_TIMEOUT)
        for name, task in self._tasks.items():
            if not task.done():
                log.error("singleton.abandoned", singleton=name)
                detach(task)

    async def _run_whenever_held(self, declared: Singleton) -> None:
        request_id.set(f"singleton/{declared.name}")
        request = LockRequest(RESERVED + declared.name, TTL, request_id.get())
        pause = PAUSE
        # The condition ends a function that catches its cancellation and returns, when the instance drains.
        while self.running:
            try:
                async with self._locks.hold(request, None, "cancel") as held:
                    log.info("singleton.began", singleton=declared.name, token=held.token)
                    await declared(held)
                    pause = PAUSE
                    log.info("singleton.returned", singleton=declared.name, token=held.token)
            except LockLost as error:
                log.warning("singleton.lost", singleton=declared.name, reason=str(error))
                continue
            except (psycopg.Error, DatabaseError) as error:
                log.warning("singleton.interrupted", singleton=declared.name, reason=" ".join(str(error).split()))
            except Exception as error:  # noqa: BLE001 — a singleton that raises anything runs again
                log.error("singleton.failed", singleton=declared.name, error=error)
                pause = min(pause * 2, MAX_PAUSE)
            await asyncio.sleep(pause)
