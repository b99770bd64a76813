"""Singletons: a function that runs on exactly one instance, for as long as that one lives and stays.

    @singleton("halts-monitor")
    async def halts_monitor(turn: Held) -> None:
        while True:
            …
            await asyncio.sleep(10)

Each instance whose code has it waits for the lock `singleton:<name>` and runs the function while it holds it. So it has
what a lock has (`locks/lock.py`): a token, `turn.guard(session)`, and an end when the lock is lost.

    its instance                    runs it next                       after
    drains                          whoever has waited longest         the function has ended: at the flag it is
                                                                       cancelled, and its lock is passed on; one
                                                                       that ignores that has it until the process ends
    is killed                       whoever has waited longest         the verdict, in a fraction of a second
    is frozen, or cut off           whoever has waited longest         the verdict, or `TTL`
    (the function) returns          whoever has waited longest         at once; this one queues again after `REST`
    (the function) raises           whoever has waited longest         at once; this one queues again after `REST`,
                                                                       and the more often the later

What it does not promise: that somebody runs it at every moment, nor that a function which ignores its cancellation has
stopped. What must not happen twice is guarded.
"""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import psycopg

from app.fleet.background import Service, detach
from app.fleet.coordination.locks.lock import RESERVED, HeldLock, Locks, Wanted
from app.fleet.errors import ActionInvalid, DatabaseError, LockLost
from app.fleet.telemetry.logs import events, request_id

NAME = re.compile(r"[a-z][a-z0-9._-]{0,99}")
TTL = 5.0
REST = 1.0
REST_MOST = 60.0
# How long a function may take to end when its instance drains.
HAND_OVER = 0.4

log = events(__name__)

Loop = Callable[[HeldLock], Awaitable[None]]


@dataclass(frozen=True)
class Singleton:
    """A named function that one instance runs; what `@singleton` makes."""

    name: str
    handler: Loop

    def __call__(self, turn: HeldLock) -> Awaitable[None]:
        return self.handler(turn)

    @property
    def place(self) -> str:
        return f"{self.handler.__module__}.{self.handler.__qualname__}"


def singleton(name: str) -> Callable[[Loop], Singleton]:
    """Make an async function one that runs on exactly one instance. Found where actions are (`FLOTILLA_ACTIONS`)."""

    def declare(handler: Loop) -> Singleton:
        where = f"the singleton {name!r} ({handler.__module__}.{handler.__qualname__}) is declared wrongly"
        if not NAME.fullmatch(name):
            raise ActionInvalid(
                f"{where}: a name is a lower-case letter, then up to 99 lower-case letters, digits, dots, hyphens and "
                f"underscores"
            )
        if not inspect.iscoroutinefunction(handler) or len(inspect.signature(handler).parameters) != 1:
            raise ActionInvalid(f"{where}: it is an async function that takes its turn: `async def name(turn: Held)`")
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
        """Say which there are, before the start."""
        self._declared = declared

    async def _start(self) -> None:
        self._tasks = {
            each.name: asyncio.create_task(self._stand_by(each), name=f"singleton-{each.name}")
            for each in self._declared
        }

    async def _stop(self) -> None:
        """End those that run here, and take no turn any more: this instance drains."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=HAND_OVER)
        for name, task in self._tasks.items():
            if not task.done():
                log.error("singleton.abandoned", singleton=name)
                detach(task)

    async def _stand_by(self, one: Singleton) -> None:
        request_id.set(f"singleton/{one.name}")
        rest = REST
        # One that catches its cancellation at a drain, and returns, has no other turn for that.
        while self.running:
            try:
                async with self._locks.hold(Wanted(RESERVED + one.name, TTL, request_id.get()), None, "cancel") as turn:
                    log.info("singleton.began", singleton=one.name, token=turn.token)
                    await one(turn)
                    rest = REST
                    log.info("singleton.returned", singleton=one.name, token=turn.token)
            except LockLost as error:
                log.warning("singleton.lost", singleton=one.name, reason=str(error))
                continue
            except (psycopg.Error, DatabaseError) as error:
                log.warning("singleton.interrupted", singleton=one.name, reason=" ".join(str(error).split()))
            except Exception as error:  # noqa: BLE001 — whatever it raises, it has another turn
                log.error("singleton.failed", singleton=one.name, error=error)
                rest = min(rest * 2, REST_MOST)
            await asyncio.sleep(rest)
