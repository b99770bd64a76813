"""What the pages read from the database, kept for a short time and shared by all viewers of this instance.

A read has a key: what is read, with its filters. The first viewer who needs it starts it; the viewers who come while it
is under way, or within `max_age` after it, get the same answer. So the number of statements depends on the number of
different pages that are open, not on the number of viewers.

    event                                    effect
    a read fails, or takes over `TIMEOUT`    all its viewers get this failure, and for `max_age` nobody reads it again:
                                             otherwise each viewer would wait for a database that does not answer
    a viewer leaves                          the read goes on for the others
    something is changed on this page        `forget`: the next viewer starts new reads; those under way are dropped
    something is changed elsewhere           is shown after `max_age`
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from fastapi import Request

from app.fleet.edge.context import Context

Value = TypeVar("Value")

MAX_AGE = 2.0
TIMEOUT = 2.0
# How many reads are kept: pages with different filters.
MOST = 200


@dataclass
class Kept:
    task: "asyncio.Task[Any]"
    max_age: float
    # On the clock of the event loop; None while it is under way.
    read_at: float | None = None

    def __post_init__(self) -> None:
        self.task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self.read_at = asyncio.get_running_loop().time()
        if not task.cancelled():
            # Its viewers may all have left: then nobody else looks at the failure.
            task.exception()

    @property
    def is_fresh(self) -> bool:
        return self.read_at is None or asyncio.get_running_loop().time() - self.read_at < self.max_age


class SharedReads:
    def __init__(self) -> None:
        # How many reads were started.
        self.reads = 0
        self._kept: dict[Hashable, Kept] = {}

    async def get(self, key: Hashable, read: Callable[[], Awaitable[Value]], max_age: float | None = None) -> Value:
        """Return what is kept under the key, or what `read` returns."""
        kept = self._kept.get(key)
        if kept is None or not kept.is_fresh:
            self.reads += 1
            task = asyncio.create_task(within_timeout(read), name="dashboard-read")
            kept = Kept(task, MAX_AGE if max_age is None else max_age)
            self._kept.pop(key, None)
            self._kept[key] = kept
            if len(self._kept) > MOST:
                del self._kept[next(iter(self._kept))]
        return cast("Value", await asyncio.shield(kept.task))

    def forget(self) -> None:
        """Something was changed here: the next page must show it."""
        self._kept.clear()


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


def context_of(request: Request) -> Context:
    found: Context = request.app.state.fleet
    return found
