"""What the pages read from the database, kept for a short time and shared by all viewers of this instance.

A read has a key: what is read, with its filters. The first viewer who needs it starts it; the viewers who come while it
is under way, or within `MAX_AGE` after it, get the same answer. So the number of statements depends on the number of
different pages that are open, not on the number of viewers.

It is limited, too. The pages of an instance share `RATE` statements a second, and may save up `BURST`. If many
different pages are open, a read that is older than `MAX_AGE` is used again, until it is `MAX_DELAY` old; the page says
how old it is. Only what was not read before, or not since, is read at once, because somebody waits for it.

    event                                    effect
    a read fails, or takes over `TIMEOUT`    all its viewers get this failure, and nobody reads it again at once:
                                             otherwise each viewer would wait for a database that does not answer
    a viewer leaves                          the read goes on for the others
    something is changed on this instance    `forget`: the next viewer starts a new read; those under way are dropped
    something is changed elsewhere           is shown after `MAX_AGE`, or after `MAX_DELAY` if many pages are open
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from fastapi import Request

from app.fleet.edge.context import Context

Value = TypeVar("Value")

MAX_AGE = 2.0
MAX_DELAY = 15.0
TIMEOUT = 2.0
# Statements a second, on average, and how many at once.
RATE = 4.0
BURST = 12.0
# How many reads are kept: pages with different filters.
MOST = 200


@dataclass
class Kept:
    task: "asyncio.Task[Any]"
    # When it ended, on the clock of the event loop; None while it is under way.
    read_at: float | None = None

    def __post_init__(self) -> None:
        self.task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self.read_at = asyncio.get_running_loop().time()
        if not task.cancelled():
            # Its viewers may all have left: then nobody else looks at the failure.
            task.exception()

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    def age(self, now: float) -> float:
        return 0.0 if self.read_at is None else now - self.read_at


class SharedReads:
    def __init__(self) -> None:
        # How many reads with statements were started.
        self.reads = 0
        self._kept: dict[Hashable, Kept] = {}
        self._saved, self._saved_at = BURST, 0.0

    async def get(
        self,
        request: Request,
        key: Hashable,
        read: Callable[[], Awaitable[Value]],
        *,
        statements: int = 1,
        max_age: float | None = None,
    ) -> Value:
        """Return what is kept under the key, or what `read` returns, which sends so many statements."""
        now = asyncio.get_running_loop().time()
        kept = self._kept.get(key)
        if kept is None or self._is_due(kept, statements, MAX_AGE if max_age is None else max_age, now):
            kept = self._start(key, read, statements)
        # The page shows the age of the oldest of its reads.
        request.state.age = max(kept.age(now), getattr(request.state, "age", 0.0))
        return cast("Value", await asyncio.shield(kept.task))

    def forget(self) -> None:
        """Something was changed here: the next page must show it."""
        self._kept.clear()

    def _is_due(self, kept: Kept, statements: int, max_age: float, now: float) -> bool:
        self._saved = min(BURST, self._saved + RATE * (now - self._saved_at))
        self._saved_at = now
        if kept.read_at is None or kept.age(now) < max_age:
            return False
        return self._saved > 0 or not statements or kept.failed or kept.age(now) >= MAX_DELAY

    def _start(self, key: Hashable, read: Callable[[], Awaitable[Value]], statements: int) -> Kept:
        self.reads += statements > 0
        self._saved -= statements
        self._kept.pop(key, None)
        kept = self._kept[key] = Kept(asyncio.create_task(within_timeout(read), name="dashboard-read"))
        if len(self._kept) > MOST:
            del self._kept[next(iter(self._kept))]
        return kept


async def within_timeout(read: Callable[[], Awaitable[Value]]) -> Value:
    async with asyncio.timeout(TIMEOUT):
        return await read()


def shared_reads(request: Request) -> SharedReads:
    """Return the reads of this application."""
    state = request.app.state
    if not hasattr(state, "dashboard"):
        state.dashboard = SharedReads()
    found: SharedReads = state.dashboard
    return found


async def shared(
    request: Request,
    key: Hashable,
    read: Callable[[], Awaitable[Value]],
    *,
    statements: int = 1,
    max_age: float | None = None,
) -> Value:
    """Return what all viewers of this application share under the key."""
    return await shared_reads(request).get(request, key, read, statements=statements, max_age=max_age)


def context_of(request: Request) -> Context:
    found: Context = request.app.state.fleet
    return found
