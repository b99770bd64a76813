"""Readiness: whether this instance should receive requests. One query at a time serves all probes.

A positive result is cached for a second, so that a flood of probes cannot use up the pool. A negative one is not, so
that a recovery is seen at once. The phase of the instance and the state of its link are not cached: they cost nothing.
"""

import asyncio
import time

import psycopg

from app.fleet.cluster.member import Member
from app.fleet.db.pool.pool import Database
from app.fleet.errors import DatabaseError

CACHED_FOR = 1.0
TIMEOUT = 1.0
# The timeout is waited for in this many parts.
WAITS = 10
NO_ANSWER = "the database does not answer"


class Readiness:
    def __init__(self, database: Database, member: Member) -> None:
        self._database = database
        self._member = member
        self._cached_until = float("-inf")
        self._ping: asyncio.Task[str | None] | None = None

    async def obstacle(self) -> str | None:
        """Return why this instance is not ready, or None if it is."""
        if not self._member.holds():
            return "the link to the database is lost"
        if not self._database.healthy:
            return NO_ANSWER
        if time.monotonic() < self._cached_until:
            return None
        if self._ping is None:
            self._ping = asyncio.create_task(self._ping_database(), name="readiness")
        # The ping is not cancelled at the timeout: on a dead network psycopg needs seconds to cancel a query, and the
        # probe needs its answer now. The ping goes on, and the next probe reads its result. The timeout is split,
        # because an event loop that was blocked for long finds one wait timed out although the result has arrived.
        ping = self._ping
        for _ in range(WAITS):
            if (await asyncio.wait({ping}, timeout=TIMEOUT / WAITS))[0]:
                return ping.result()
        return NO_ANSWER

    async def _ping_database(self) -> str | None:
        try:
            await self._database.ping()
        except (psycopg.Error, DatabaseError):
            return NO_ANSWER
        finally:
            self._ping = None
        self._cached_until = time.monotonic() + CACHED_FOR
        return None
