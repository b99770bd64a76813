"""An answer of the database that all viewers share: read at most once in a while, however many viewers there are."""

import asyncio
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Shared(Generic[Answer]):
    def __init__(self) -> None:
        self.reads = 0
        self._lock = asyncio.Lock()
        # The last answer, or why there is none, and when it was read. Viewers share a failure too: otherwise each of
        # them would wait for a database that does not answer, one after the other.
        self._last: Answer | Exception | None = None
        self._read_at = 0.0
        self._changes = 0

    async def get(self, max_age: float, timeout: float) -> Answer:
        """Return the last answer; if it is older than `max_age`, read it within `timeout` first. Both in seconds."""
        async with self._lock:
            loop = asyncio.get_running_loop()
            if self._last is None or loop.time() - self._read_at >= max_age:
                changes = self._changes
                self.reads += 1
                try:
                    async with asyncio.timeout(timeout):
                        found: Answer | Exception = await self._read()
                except Exception as error:  # noqa: BLE001 — raised below, and for the other viewers
                    found = error
                # A change that was made during the read may not be in it.
                self._last = found if changes == self._changes else None
                self._read_at = loop.time()
            else:
                found = self._last
        if isinstance(found, Exception):
            raise found
        return found

    def forget(self) -> None:
        """Something was changed here: the next page must show it."""
        self._changes += 1
        self._last = None

    async def _read(self) -> Answer:
        raise NotImplementedError
