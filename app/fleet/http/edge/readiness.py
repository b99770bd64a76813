"""May this instance be sent requests? Cached, and asked of the database once however many probes ask.

Good news is kept for a second, so that a flood of probes cannot use up the pool; bad news is asked again each time, so
that recovery is seen at once. The flag of the shutdown and the link are looked at without any cache: they cost nothing.
"""

import asyncio
import time

import psycopg

from app.fleet.cluster.member import Member
from app.fleet.db.pool import Database
from app.fleet.errors import DatabaseError

CACHED_FOR = 1.0
PATIENCE = 1.0
WAITS = 10
NO_ANSWER = "the database does not answer"


class Readiness:
    def __init__(self, database: Database, member: Member) -> None:
        self._database = database
        self._member = member
        self._good_until = float("-inf")
        self._asking: asyncio.Task[str | None] | None = None

    async def obstacle(self) -> str | None:
        """Say what stands in the way, if anything does."""
        if not self._member.holds():
            return "the link to the database is lost"
        if not self._database.healthy:
            return NO_ANSWER
        if time.monotonic() < self._good_until:
            return None
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name="readiness")
        # Waited for and not cancelled: on a dead network psycopg needs seconds to cancel a query, and a probe's answer
        # is due now. The question stays open, for the next probe to find answered. In several waits, because an event
        # loop that was busy for long finds all of one wait used up, and the answer there.
        asking = self._asking
        for _ in range(WAITS):
            if (await asyncio.wait({asking}, timeout=PATIENCE / WAITS))[0]:
                return asking.result()
        return NO_ANSWER

    async def _ask(self) -> str | None:
        try:
            await self._database.ping()
        except (psycopg.Error, DatabaseError):
            return NO_ANSWER
        finally:
            self._asking = None
        self._good_until = time.monotonic() + CACHED_FOR
        return None
