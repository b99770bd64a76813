"""The pacer: resumes waiting followers in their order, a few in each iteration of the event loop.

Without it, a change that 2,000 clients follow would be encoded and sent to all of them before the event loop serves the
next request.
"""

import asyncio
from collections import deque
from collections.abc import Callable

RESUMED_PER_ITERATION = 20
# How many iterations in a row the pacer may leave to more urgent work.
MAX_DEFERRALS = 10


class Pacer:
    def __init__(self, per_iteration: int = RESUMED_PER_ITERATION, is_busy: Callable[[], bool] = lambda: False) -> None:
        """`is_busy` returns whether the event loop has more urgent work; that defers the waiting tasks."""
        self._per_iteration = per_iteration
        self._is_busy = is_busy
        self._deferrals = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def wait(self) -> None:
        """Wait for the next turn. A client waits once for each piece that is sent to it."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.enqueue(waiting)
        await waiting

    def enqueue(self, waiting: "asyncio.Future[None]") -> None:
        """Set the result of this future when its turn comes."""
        self._queue.append(waiting)
        if not self._scheduled:
            self._scheduled = True
            waiting.get_loop().call_soon(self._resume_some)

    def _resume_some(self) -> None:
        resumed = 0
        if self._is_busy() and self._deferrals < MAX_DEFERRALS:
            self._deferrals += 1
            self._queue[0].get_loop().call_soon(self._resume_some)
            return
        self._deferrals = 0
        while self._queue and resumed < self._per_iteration:
            waiting = self._queue.popleft()
            # It is done already if its task was cancelled, or its wait has timed out.
            if not waiting.done():
                waiting.set_result(None)
                resumed += 1
        if self._queue:
            self._queue[0].get_loop().call_soon(self._resume_some)
        else:
            self._scheduled = False
