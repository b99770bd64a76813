"""The one contract of everything that runs in the background: start, stop, and nothing else.

A service may be stopped before it was started, started twice and stopped twice; each of these does the obvious thing
and never raises. `stop` returns when the service has let go of what it holds: no task, thread or session of its own
is left. A service that was stopped stays stopped; an instance that wants another one makes another one.

Subclasses write `_start` and `_stop` and are called at most once each. `_stop` is called even when `_start` failed
half-way, so it must cope with what is not there yet.
"""

import asyncio
from contextlib import suppress
from typing import Any, final

AGAIN = 0.25


async def cancel_and_wait(task: "asyncio.Task[Any] | None") -> None:
    """Cancel a task of one's own, if there is one, and wait until it is gone.

    It is cancelled every `AGAIN` until then: on Python 3.11, `asyncio.wait_for` can lose a cancellation
    (`wait_for_event`), and psycopg's pool waits for a connection with that.
    """
    if task is None:
        return
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=AGAIN)
    if not task.cancelled():
        # It is of no interest any more, and the loop need not complain that nobody has looked at it.
        task.exception()


def detach(task: "asyncio.Task[Any]") -> None:
    """Let the process end although this task never does: the loop's end waits for every task it knows."""
    asyncio._unregister_task(task)  # noqa: SLF001 — documented, under this name
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 — it is in the log already


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for an event, or for that long.

    Not with `asyncio.wait_for`: on Python 3.11 it returns, and the cancellation is lost, if its task is cancelled in
    the moment in which what it waits for has come. A loop that is cancelled in that moment would go on for ever.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class Service:
    name = "service"

    def __init__(self) -> None:
        self._started = False
        self._stopped = False
        self._turn = asyncio.Lock()

    @property
    def running(self) -> bool:
        return self._started and not self._stopped

    @final
    async def start(self) -> None:
        async with self._turn:
            if self._started or self._stopped:
                return
            self._started = True
            await self._start()

    @final
    async def stop(self) -> None:
        async with self._turn:
            if not self._started or self._stopped:
                self._stopped = True
                return
            self._stopped = True
            await self._stop()

    async def _start(self) -> None:
        """Take what the service needs and begin."""

    async def _stop(self) -> None:
        """End, and let go of everything."""
