"""Rate limits that all instances share: so many permits in so long, in the whole cluster.

    await limit("tides", "10/s")
    await client.get(…)

A limit is a row of `limits`. Its `used_until` is the time up to which its permits are used. `LEASE` advances it by one
interval for each permit, and returns the time of the first (GCRA). So a permit is a point in time, no two instances
have the same one, and no instance waits for another: it waits only for the time of its permit. `permits.py` leases
permits and hands them to the callers that wait.

Guarantees:

- In any period, all instances together use at most `burst + rate × (seconds + tolerance)` permits. A permit may be
  used for the tolerance after its time: `RATE_TOLERANCE`, or a tenth of the interval if that is longer, and the time
  that PostgreSQL took to answer, usually a few milliseconds. It is never used early: its time counts from the answer.
- An older permit is discarded, and another one leased. So is the lease of an answer that took longer than
  `MAX_ANSWER_TIME`. So an instance that was frozen, or blocked its event loop, does not use many permits at once when
  it continues.
- No waiter starves. The waiters of an instance are served in order. An instance leases what is left of the burst, or
  the permits of `LEASE_SECONDS`, or one, and leases again only when less than `LEASE_AHEAD` of them is left. The next
  instance leases the permits right after. So each of n instances has a turn after at most n leases, however many
  waiters the others have.
- Nothing passes without a permit. While the database is away, all callers wait, for as long as their `wait` allows.

    event                                            the permits
    a waiter gives up or is cancelled                go to the next waiter of this instance, or are lost if there is
                                                     none in time
    the process dies, or the answer is lost          are lost if they were leased: for `LEASE_SECONDS`, or one
    two releases use one name with different rates   advance the row by the interval of their own rate
    PostgreSQL crashes, or fails over                continue from the state of the row that was kept
    the server's clock is set back                   are delayed until the clock has caught up, or the row is deleted

Cost: one statement for all waiters of an instance, and one statement at a time; none if there are no waiters, and none
for callers that are refused because of the last answer. Rows are small and stay; a row whose `used_until` is in the
past has the same effect as no row.

Not guaranteed: when a request reaches the system that the limit protects. What happens after `limit` has returned is up
to the caller and the network. Threads cannot use limits: they are for code of the event loop.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from app.fleet.background import Service
from app.fleet.cluster.link import clock
from app.fleet.coordination.permits import LEASE, Limit, PermitQueue
from app.fleet.db.pool.pool import Connection, Database
from app.fleet.errors import LimitReached
from app.fleet.telemetry import tracing
from app.fleet.telemetry.metrics import ByName

# How long a caller waits for the database to answer, even with `wait=0`.
MIN_TIMEOUT = 1.0


class Limits(Service):
    """The limits that callers of this instance wait for."""

    name = "limits"

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.permits = ByName()
        self.refused = ByName()
        self._lease_sql = database.namespace.sql(LEASE)
        self.connection: Callable[[], AbstractAsyncContextManager[Connection]] = database.autocommit
        self._queues: dict[Limit, PermitQueue] = {}

    @property
    def waiting(self) -> ByName:
        counts = ByName()
        for queue in self._queues.values():
            counts.add(queue.limit.name, queue.waiting)
        return counts

    async def take(self, limit: Limit, wait: float | None) -> None:
        """Wait for a permit: for `wait` seconds, or without a limit if that is None."""
        with tracing.spanning("limit", {"flotilla.limit": limit.name}):
            await self._take(limit, wait)

    async def _take(self, limit: Limit, wait: float | None) -> None:
        until = math.inf if wait is None else clock() + wait
        try:
            async with asyncio.timeout(None if wait is None else max(wait, MIN_TIMEOUT)):
                # The process may have been frozen after the permit was handed out.
                while not (queue := self._queue(limit)).usable(await queue.wait(until)):
                    pass
        except (TimeoutError, LimitReached) as error:
            self.refused.add(limit.name)
            if isinstance(error, LimitReached):
                raise
            queue = self._queue(limit)
            raise queue.refusal(limit.interval if queue.database_answers else MIN_TIMEOUT) from None
        self.permits.add(limit.name)

    async def _stop(self) -> None:
        for queue in list(self._queues.values()):
            await queue.stop()

    def _queue(self, limit: Limit) -> PermitQueue:
        queue = self._queues.get(limit)
        if queue is None:
            self._remove_idle()
            queue = self._queues[limit] = PermitQueue(limit, self.connection, self._lease_sql)
        return queue

    def _remove_idle(self) -> None:
        for limit in [limit for limit, queue in self._queues.items() if queue.idle]:
            del self._queues[limit]
