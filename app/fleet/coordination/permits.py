"""The permits of one limit on one instance: leasing them, and handing them to the callers that wait.

`limits.py` has the protocol. Callers wait in order. While there are fewer permits than waiters, one task leases more.
Each waiter is given a permit when the time of the permit has come. A caller that cannot have a permit within its `wait`
is refused as soon as the answer to a lease makes that certain.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import psycopg

from app.fleet.background import LoopErrors, cancel_and_wait
from app.fleet.cluster.link import clock
from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.db.pool.statements import fetch
from app.fleet.duration import RATE_TOLERANCE, Rate, format_duration
from app.fleet.errors import DatabaseError, LimitInvalid, LimitReached
from app.fleet.telemetry.logs import event_log
from app.fleet.validation import check_name

# An instance leases the permits of this time at once, and leases again when less than `LEASE_AHEAD` of it is left. That
# is longer than a statement takes, so that no permit is late.
LEASE_SECONDS = 0.1
LEASE_AHEAD = 0.05
# A permit may be used for `RATE_TOLERANCE` after its time, or for this share of the interval if that is longer.
TOLERANCE_SHARE = 0.1
MAX_ANSWER_TIME = 0.5
RETRY_INTERVAL = 0.25
# For how long the last answer is used to refuse callers.
ANSWER_LIFETIME = 1.0
# The event loop's timers have this resolution. A timer must not fire early.
TIMER_RESOLUTION = 0.001

log = event_log(__name__)

# Transactions lock the row one after another, and only then read the clock. `first` is the time of the first permit, in
# seconds from then; it is negative while a part of the burst is left. The lease has as many permits as waiters need,
# but no more than `lease_size` of the future ones, and none later than `max_wait`. The very first statement for a name
# only inserts the row, and returns nothing; the caller repeats it.
LEASE = Statement("""
WITH existing AS MATERIALIZED (
    SELECT name, used_until
    FROM {schema}.limits
    WHERE name = %(name)s
    FOR UPDATE
), inserted AS (
    INSERT INTO {schema}.limits (name, used_until, rate_interval, rate_burst)
    SELECT %(name)s, clock_timestamp(), %(interval)s, %(burst)s
    WHERE NOT EXISTS (SELECT FROM existing)
    ON CONFLICT (name) DO NOTHING
), read AS MATERIALIZED (
    SELECT name, used_until, clock_timestamp() AS now
    FROM existing
), free AS MATERIALIZED (
    SELECT name, greatest(used_until, now) AS since,
           extract(epoch FROM greatest(used_until, now) - now)::float8 - %(burst_seconds)s::float8 AS first
    FROM read
), lease AS MATERIALIZED (
    SELECT name, since, first,
           greatest(0, least(
               %(waiters)s::float8,
               greatest(%(lease_size)s::float8, floor(-first / %(interval)s::float8) + 1),
               floor((%(max_wait)s::float8 - first) / %(interval)s::float8) + 1
           ))::int AS permits
    FROM free
), updated AS (
    UPDATE {schema}.limits AS l
    SET used_until = u.since + make_interval(secs => u.permits * %(interval)s::float8),
        rate_interval = %(interval)s, rate_burst = %(burst)s
    FROM lease AS u
    WHERE l.name = u.name AND u.permits > 0
)
SELECT permits, first FROM lease
""")


@dataclass(frozen=True)
class Limit:
    """The arguments of `limit`: one permit every `interval` seconds, and up to `burst` at once after a pause."""

    name: str
    rate: str
    interval: float
    burst: int

    @classmethod
    def of(cls, name: str, rate: str, burst: int) -> Self:
        check_name("limit", name, LimitInvalid)
        try:
            return cls(name, rate, Rate.parse(rate, burst).interval, burst)
        except ValueError as error:
            raise LimitInvalid(f"the limit {name!r}: {error}") from None

    @property
    def tolerance(self) -> float:
        return max(RATE_TOLERANCE, TOLERANCE_SHARE * self.interval)

    @property
    def lease_size(self) -> int:
        return max(1, int(LEASE_SECONDS / self.interval))


class Permit(NamedTuple):
    """The time of a permit by this machine's clock. The answer took some time, so there are two bounds.

    `earliest` decides that a caller cannot be served in time. `latest` decides when the permit is used.
    """

    earliest: float
    latest: float


class PermitQueue:
    """The callers of this instance that wait for one limit, in order, and the permits that were leased for them."""

    def __init__(
        self, limit: Limit, connection: Callable[[], AbstractAsyncContextManager[Connection]], lease_sql: bytes
    ) -> None:
        self.limit = limit
        self.database_answers = False
        self._connection = connection
        self._lease_sql = lease_sql
        # Until when each waiter waits.
        self._waiters: dict[asyncio.Future[Permit], float] = {}
        self._permits: deque[Permit] = deque()
        # As of the last answer, no other permit is earlier than this.
        self._free_from = -math.inf
        self._answered_at = -math.inf
        self._leasing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._errors = LoopErrors(
            log,
            service="limits",
            defect="cluster.defect",
            failed="limit.failed",
            retry_interval=RETRY_INTERVAL,
            limit=limit.name,
        )

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    @property
    def idle(self) -> bool:
        """Whether there are no waiters, and nothing here is of use to the next one."""
        usable = self._permits and self.usable(self._permits[-1])
        return not (self._waiters or self._leasing or usable or clock() - self._answered_at <= ANSWER_LIFETIME)

    async def wait(self, until: float) -> Permit:
        """Wait for a permit, and raise `LimitReached` as soon as it is certain that none comes in time."""
        now = clock()
        if self._earliest(len(self._waiters)) > max(until, now):
            raise self.refusal(self._earliest(len(self._waiters)) - now)
        waiter: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = until
        self._hand_out()
        try:
            return await waiter
        finally:
            self._waiters.pop(waiter, None)

    def usable(self, permit: Permit) -> bool:
        return clock() - permit.latest <= self.limit.tolerance

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await cancel_and_wait(self._leasing)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(refusal(self.limit, "is not served here, because this instance shuts down", 1.0))

    # -- handing out --------------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give the permits that are due to the waiters, and start the timer or the lease for the others."""
        while self._permits and not self.usable(self._permits[0]):
            self._permits.popleft()
        while self._permits and self._waiters and self._permits[0].latest <= clock():
            waiter = next(iter(self._waiters))
            del self._waiters[waiter]
            # A waiter that was just cancelled is done, and must not consume a permit.
            if not waiter.done():
                waiter.set_result(self._permits.popleft())
        if self._permits and self._waiters and self._timer is None:
            delay = math.ceil((self._permits[0].latest - clock()) / TIMER_RESOLUTION) * TIMER_RESOLUTION
            self._timer = asyncio.get_running_loop().call_later(max(TIMER_RESOLUTION, delay), self._timer_fired)
        if len(self._waiters) > len(self._permits) and self._leasing is None:
            self._leasing = asyncio.create_task(self._lease_for_all(), name=f"limit-{self.limit.name}")

    def _timer_fired(self) -> None:
        self._timer = None
        self._hand_out()

    def _earliest(self, position: int) -> float:
        """Return a time before which the waiter at this position cannot have a permit, as far as is known."""
        if position < len(self._permits):
            return self._permits[position].earliest
        if self._permits or clock() - self._answered_at <= ANSWER_LIFETIME:
            return self._free_from + (position - len(self._permits)) * self.limit.interval
        return -math.inf

    def _refuse_too_late(self) -> None:
        """Refuse the waiters that cannot have a permit in time; the others move up."""
        now, position = clock(), 0
        for waiter, until in list(self._waiters.items()):
            earliest = self._earliest(position)
            if earliest <= max(until, now):
                position += 1
            elif not waiter.done():
                del self._waiters[waiter]
                waiter.set_exception(self.refusal(earliest - now))

    def refusal(self, seconds: float) -> LimitReached:
        reason = "is used up" if self.database_answers else "cannot be read, because the database does not answer"
        return refusal(self.limit, reason, seconds)

    # -- leasing ------------------------------------------------------------------------------------------------------

    async def _lease_for_all(self) -> None:
        """Lease permits, in turns with the other instances, until there is one for each waiter."""
        while (missing := len(self._waiters) - len(self._permits)) > 0:
            left = self._permits[-1].latest - clock() if self._permits else 0.0
            if left > LEASE_AHEAD:
                await asyncio.sleep(left - LEASE_AHEAD)
                continue
            async with self._errors.logged():
                await self._lease(missing)
        self._leasing = None

    async def _lease(self, waiters: int) -> None:
        try:
            async with self._connection() as connection:
                sent = clock()
                # A caller with `wait=0` waits for this answer, too.
                for waiter, until in self._waiters.items():
                    self._waiters[waiter] = max(until, sent)
                max_wait = max(self._waiters.values(), default=sent) - sent
                rows = await fetch(connection, self._lease_sql, self._values(waiters, max_wait))
        except (psycopg.Error, DatabaseError):
            self.database_answers = False
            raise
        received = clock()
        self.database_answers = True
        if not rows or received - sent > MAX_ANSWER_TIME:
            return
        ((permits, first),) = rows
        interval = self.limit.interval
        seconds = [max(0.0, first + number * interval) for number in range(permits)]
        self._permits += [Permit(sent + each, received + each) for each in seconds]
        self._free_from, self._answered_at = sent + first + permits * interval, received
        self._refuse_too_late()
        self._hand_out()

    def _values(self, waiters: int, max_wait: float) -> Mapping[str, Any]:
        limit = self.limit
        return {
            "name": limit.name,
            "interval": limit.interval,
            "burst": limit.burst,
            # How far `used_until` may be ahead of the clock.
            "burst_seconds": (limit.burst - 1) * limit.interval,
            "waiters": waiters,
            "lease_size": limit.lease_size,
            "max_wait": max_wait,
        }


def refusal(limit: Limit, reason: str, seconds: float) -> LimitReached:
    text = f"the limit {limit.name!r} of {limit.rate} {reason}: try again in {format_duration(float(f'{seconds:.2g}'))}"
    return LimitReached(text, retry_after=seconds)
