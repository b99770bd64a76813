"""Slots for sessions of callers: they leave some connections of the pool free for statements of the fleet.

A caller that holds a session may need a second connection before it can finish: for a lock, a limit, a breaker, a key
of `once`, or a trigger. If callers' sessions could take every connection, each of them could wait for another. So at
most `session_limit` sessions are borrowed at once. The fleet's own statements are short and need no second connection,
so they always finish, and a caller never waits for itself.

Not guaranteed: that a caller gets a second session while all slots are taken. It waits for a slot for at most
`POOL_TIMEOUT`.
"""

import asyncio

from psycopg_pool import PoolTimeout, TooManyRequests

from app.fleet.db.pool.dedicated import DEDICATED_CONNECTIONS, MIN_POOL_SIZE

# One of every five connections is reserved for the fleet's own statements, and at most four.
RESERVED_SHARE = 5
MAX_RESERVED = 4


def session_limit(pool_max: int) -> int:
    """Return how many sessions of callers a pool of this size lends at once. A pool of one reserves nothing."""
    dedicated = DEDICATED_CONNECTIONS if pool_max >= MIN_POOL_SIZE else 0
    reserved = min(max(1, pool_max // RESERVED_SHARE), MAX_RESERVED)
    return max(1, pool_max - dedicated - reserved)


class SessionSlots:
    def __init__(self, pool_max: int, *, timeout: float, max_waiting: int) -> None:
        self.waiting = 0
        # Callers that got no slot, within the timeout or because too many were waiting.
        self.refused = 0
        self._timeout = timeout
        self._max_waiting = max_waiting
        self._free = asyncio.Semaphore(session_limit(pool_max))

    async def take(self) -> None:
        if self.waiting >= self._max_waiting:
            self.refused += 1
            raise TooManyRequests(f"{self.waiting} requests are already waiting for a session of the pool")
        self.waiting += 1
        try:
            async with asyncio.timeout(self._timeout):
                await self._free.acquire()
        except TimeoutError:
            self.refused += 1
            raise PoolTimeout(f"no session of the pool was free within {self._timeout:g} s") from None
        finally:
            self.waiting -= 1

    def release(self) -> None:
        self._free.release()
