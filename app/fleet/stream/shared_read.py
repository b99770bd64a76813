"""A shared read: callers that wait at the same time are served by one read of the database.

One read is under way at a time. Callers that come meanwhile wait for the next one, which serves up to `at_once` of
their keys together. An exception of the read is raised in all of its callers.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Generic, TypeVar

from app.fleet.background import cancel_and_wait
from app.fleet.db.pool.pool import DatabaseAway

# How long a caller waits for its result.
READ_TIMEOUT = 10.0

Key = TypeVar("Key")
Result = TypeVar("Result")


class SharedRead(Generic[Key, Result]):
    """Calls `read` with the waiting keys; `read` returns the results that exist.

    The read runs in a task of its own, which continues when a caller is cancelled. When a client has left, the
    framework cancels its stream repeatedly until the stream has ended. psycopg needs a moment to cancel a statement, so
    without the task the connection would be lost.
    """

    def __init__(self, read: Callable[[Collection[Key]], Awaitable[Mapping[Key, Result]]], at_once: int) -> None:
        self._read = read
        self._at_once = at_once
        self._waiting: dict[Key, list[asyncio.Future[Result | None]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def get(self, key: Key) -> Result | None:
        """Return the result for this key from a read that has not yet begun; None if there is none."""
        result: asyncio.Future[Result | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(result)
        if self._task is None:
            # In an empty context, because the task also serves other requests.
            self._task = asyncio.create_task(self._read_all(), name="shared-read", context=contextvars.Context())
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                return await result
        except TimeoutError:
            raise DatabaseAway("the database takes too long to answer; try again shortly") from None

    async def stop(self) -> None:
        await cancel_and_wait(self._task)
        stopped = DatabaseAway("this instance is stopping; try again at another")
        self._fail([result for results in self._waiting.values() for result in results], stopped)

    async def _read_all(self) -> None:
        try:
            while self._waiting:
                batch = dict(list(self._waiting.items())[: self._at_once])
                self._waiting = {key: results for key, results in self._waiting.items() if key not in batch}
                try:
                    found = await self._read(batch)
                except Exception as error:  # noqa: BLE001 — raised in each caller
                    self._fail([result for results in batch.values() for result in results], error)
                    continue
                except asyncio.CancelledError:
                    self._waiting |= batch
                    raise
                for key, results in batch.items():
                    for result in results:
                        if not result.done():
                            result.set_result(found.get(key))
        finally:
            self._task = None

    def _fail(self, results: Iterable["asyncio.Future[Result | None]"], error: Exception) -> None:
        for result in results:
            if not result.done():
                result.set_exception(error)
                # Marks the exception as retrieved, in case the caller was cancelled just now.
                result.exception()
