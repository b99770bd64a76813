"""Limits: so many in so long, from the whole cluster, whoever asks.

    await limit("tides", "10/s")
    await client.get(…)

A limit is a row of `limits`: until when it is used up. `LEASE` moves that on by one interval for each permit, and
answers with the instant of the first (GCRA). So a permit is an instant, no two instances have the same one, and nobody
waits for another instance: only for the time. What it promises:

- In any span of so many seconds, at most `burst + rate × (seconds + late)` are let through, by all instances together.
  `late` is what a permit may be used after its instant: `LATE`, or a tenth of the interval if that is longer, and what
  PostgreSQL took to answer, most often a few milliseconds. Never before: an instant counts from when the answer came.
- A permit that is later than that is thrown away, and another one leased. So is an answer that took longer than
  `ANSWER_MOST`. Who was frozen, or blocked its event loop, does not let a heap through when it wakes.
- Nobody starves. Here, first come is first served. An instance leases at once what is left of the burst, or `HORIZON`
  worth of permits, or one, and more only when less than `AHEAD` of them is left; whoever asks next has the instants
  right after those. So of n instances each has its turn after at most n of these, however many wait at the others.
- Without a permit nothing passes. While the database is away, everyone waits, for as long as they want to.

    what happens                                     the permits
    who waits gives up, or is cancelled              go to the next one here; if nobody comes by then, they are lost
    the process dies, or the answer does             that were leased are lost: `HORIZON` worth, or one
    two releases use another rate of the same name   each moves the row on by its own interval
    PostgreSQL crashes, or fails over                as far as the row was kept
    the server's clock is set back                   come when it is past that time again, or the row was deleted

It costs a statement for as many as wait here, one at a time of each instance; nothing when nobody waits, and nothing
for who is refused by what the last answer said. Rows are tiny and stay; one that is used up until a time in the past
says the same as none.

What it does not promise: when a request reaches whoever is to be spared. What becomes of it after `limit` has returned
is in the caller's hands, and the network's. Nor anything to threads: it is for code of the event loop.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import psycopg

from app.fleet.background import Service, cancel_and_wait
from app.fleet.cluster.link import clock
from app.fleet.db.namespace import Statement
from app.fleet.db.pool import Connection, Database
from app.fleet.db.statements import fetch
from app.fleet.duration import MAX_DURATION, Rate, format_duration
from app.fleet.errors import DatabaseError, LimitInvalid, LimitReached
from app.fleet.telemetry.logs import events
from app.fleet.telemetry.metrics import ByName
from app.fleet.validation import check_count, check_name

# How much of a limit's time an instance leases at once.
HORIZON = 0.1
# And leases more when less than this of it is left: longer than a statement takes, so that no time is lost.
AHEAD = 0.05
# How long after its instant a permit may still be used; or this share of the interval.
LATE = 0.05
LATE_SHARE = 0.1
ANSWER_MOST = 0.5
# Who does not want to wait still lets the database answer for so long.
PATIENCE = 1.0
RETRY = 0.25
AFTER_DEFECT = 1.0
# For how long it is believed how much an answer said is used up.
BELIEVED = 1.0
BURST_MOST = 1_000_000
# Timers are no finer, and must not be early.
TICK = 0.001

log = events(__name__)

# One transaction after another has the row, and then reads the clock. `first` is in how many seconds the first permit
# is, from then; negative while some of the burst is left. As many as wait, but of those in the future no more than
# `most`, and none that nobody waits for so long. The first one ever to use a name only makes the row, and asks again.
LEASE = Statement("""
WITH known AS MATERIALIZED (
    SELECT name, used_until
    FROM {schema}.limits
    WHERE name = %(name)s
    FOR UPDATE
), made AS (
    INSERT INTO {schema}.limits (name, used_until)
    SELECT %(name)s, clock_timestamp()
    WHERE NOT EXISTS (SELECT FROM known)
    ON CONFLICT (name) DO NOTHING
), read AS MATERIALIZED (
    SELECT name, used_until, clock_timestamp() AS now
    FROM known
), free AS MATERIALIZED (
    SELECT name, greatest(used_until, now) AS since,
           extract(epoch FROM greatest(used_until, now) - now)::float8 - %(burst)s::float8 AS first
    FROM read
), lease AS MATERIALIZED (
    SELECT name, since, first,
           greatest(0, least(
               %(wanted)s::float8,
               greatest(%(most)s::float8, floor(-first / %(interval)s::float8) + 1),
               floor((%(within)s::float8 - first) / %(interval)s::float8) + 1
           ))::int AS taken
    FROM free
), moved AS (
    UPDATE {schema}.limits AS l
    SET used_until = u.since + make_interval(secs => u.taken * %(interval)s::float8)
    FROM lease AS u
    WHERE l.name = u.name AND u.taken > 0
)
SELECT taken, first FROM lease
""")


@dataclass(frozen=True)
class Limit:
    """What is asked for: one each `interval` seconds, and up to `burst` at once after a pause."""

    name: str
    rate: str
    interval: float
    burst: int

    @classmethod
    def of(cls, name: str, rate: str, burst: int) -> Self:
        check_name("limit", name, LimitInvalid)
        check_count("burst", burst, BURST_MOST, LimitInvalid)
        try:
            interval = Rate.parse(str(rate)).interval
        except ValueError as error:
            raise LimitInvalid(f"the limit {name!r}: {error}") from None
        if interval * burst > MAX_DURATION:
            raise LimitInvalid(f"the limit {name!r} has a burst of {burst} at {rate}: more than a year's worth")
        return cls(name, rate, interval, burst)

    @property
    def late(self) -> float:
        return max(LATE, LATE_SHARE * self.interval)

    @property
    def most(self) -> int:
        return max(1, int(HORIZON / self.interval))


class Permit(NamedTuple):
    """An instant by this machine's clock: the one for which it was given, if the answer took no time, and the latest
    it can be, which is the one that counts.
    """

    slot: float
    at: float


class Line:
    """Those who wait here for one limit, in the order in which they came, and the permits that were leased for them."""

    def __init__(self, limit: Limit, limits: "Limits") -> None:
        self.limit = limit
        # Whether the database did, the last time it was asked.
        self.answers = False
        self._limits = limits
        # Until when each wants to wait.
        self._waiting: dict[asyncio.Future[Permit], float] = {}
        self._permits: deque[Permit] = deque()
        # No other permit comes before this, as of the last answer.
        self._free_from = -math.inf
        self._heard = -math.inf
        self._leasing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Nobody waits, and there is nothing here that could be of use to the next one."""
        left = self._permits and self.fresh(self._permits[-1])
        return not (self._waiting or self._leasing or left or clock() - self._heard <= BELIEVED)

    async def stand(self, until: float) -> Permit:
        """Wait for a permit, for so long at most; refuse as soon as none can come in time."""
        now = clock()
        if self._expected(len(self._waiting)) > max(until, now):
            raise self.refusal(self._expected(len(self._waiting)) - now)
        place: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        self._waiting[place] = until
        self._look()
        try:
            return await place
        finally:
            self._waiting.pop(place, None)

    def fresh(self, permit: Permit) -> bool:
        return clock() - permit.at <= self.limit.late

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await cancel_and_wait(self._leasing)
        for place in self._waiting:
            if not place.done():
                place.set_exception(
                    refusal(self.limit, "is not served here any more, because this instance leaves", 1.0)
                )

    # -- handing out --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Hand out what is due, and see to it that somebody looks again when more is."""
        while self._permits and not self.fresh(self._permits[0]):
            self._permits.popleft()
        while self._permits and self._waiting and self._permits[0].at <= clock():
            place = next(iter(self._waiting))
            del self._waiting[place]
            # One that was cancelled a moment ago, and has not left yet, takes no permit with it.
            if not place.done():
                place.set_result(self._permits.popleft())
        if self._permits and self._waiting and self._timer is None:
            delay = max(TICK, math.ceil((self._permits[0].at - clock()) / TICK) * TICK)
            self._timer = asyncio.get_running_loop().call_later(delay, self._ring)
        if len(self._waiting) > len(self._permits) and self._leasing is None:
            self._leasing = asyncio.create_task(self._lease(), name=f"limit-{self.limit.name}")

    def _ring(self) -> None:
        self._timer = None
        self._look()

    def _expected(self, place: int) -> float:
        """No earlier than this whoever stands at that place has a permit, as far as is known."""
        if place < len(self._permits):
            return self._permits[place].slot
        if self._permits or clock() - self._heard <= BELIEVED:
            return self._free_from + (place - len(self._permits)) * self.limit.interval
        return -math.inf

    def _refuse(self) -> None:
        """Refuse those to whom none comes in time any more; the others move up."""
        now, left = clock(), 0
        for place, until in list(self._waiting.items()):
            expected = self._expected(left)
            if expected <= max(until, now):
                left += 1
            elif not place.done():
                del self._waiting[place]
                place.set_exception(self.refusal(expected - now))

    def refusal(self, seconds: float) -> LimitReached:
        why = "is used up" if self.answers else "cannot be asked, because the database does not answer"
        return refusal(self.limit, why, seconds)

    # -- leasing ------------------------------------------------------------------------------------------------------

    async def _lease(self) -> None:
        """Lease for those who wait, in turns with the other instances, until there is a permit for each."""
        while (wanted := len(self._waiting) - len(self._permits)) > 0:
            left = self._permits[-1].at - clock() if self._permits else 0.0
            if left > AHEAD:
                await asyncio.sleep(left - AHEAD)
                continue
            try:
                await self._ask(wanted)
            except (psycopg.Error, DatabaseError) as error:
                log.debug("limit.failed", limit=self.limit.name, reason=" ".join(str(error).split()))
                self.answers = False
                await asyncio.sleep(RETRY)
            except Exception as error:  # noqa: BLE001 — a defect of ours must not end it for good
                log.error("cluster.defect", error=error, service="limits")
                await asyncio.sleep(AFTER_DEFECT)
        self._leasing = None

    async def _ask(self, wanted: int) -> None:
        async with self._limits.connection() as connection:
            sent = clock()
            # Who would not wait at all still waits for the answer.
            for place, until in self._waiting.items():
                self._waiting[place] = max(until, sent)
            within = max(self._waiting.values(), default=sent) - sent
            rows = await fetch(connection, self._limits.lease, self._values(wanted, within))
        received = clock()
        self.answers = True
        if not rows or received - sent > ANSWER_MOST:
            return
        ((taken, first),) = rows
        interval = self.limit.interval
        seconds = [max(0.0, first + number * interval) for number in range(taken)]
        self._permits += [Permit(sent + each, received + each) for each in seconds]
        self._free_from, self._heard = sent + first + taken * interval, received
        self._refuse()
        self._look()

    def _values(self, wanted: int, within: float) -> Mapping[str, Any]:
        limit = self.limit
        return {
            "name": limit.name,
            "interval": limit.interval,
            # How far ahead of the clock it may be used up.
            "burst": (limit.burst - 1) * limit.interval,
            "wanted": wanted,
            "most": limit.most,
            "within": within,
        }


class Limits(Service):
    """The limits that are waited for on this instance."""

    name = "limits"

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.permits = ByName()
        self.refused = ByName()
        self.lease = database.namespace.sql(LEASE)
        self.connection: Callable[[], AbstractAsyncContextManager[Connection]] = database.autocommit
        self._lines: dict[Limit, Line] = {}

    @property
    def waiting(self) -> ByName:
        found = ByName()
        for line in self._lines.values():
            found.add(line.limit.name, line.waiting)
        return found

    async def take(self, limit: Limit, wait: float | None) -> None:
        """Wait for a permit, for as long as it takes or so many seconds."""
        until = math.inf if wait is None else clock() + wait
        try:
            async with asyncio.timeout(None if wait is None else max(wait, PATIENCE)):
                # Between the moment a permit is handed out and this one, the process may have been frozen.
                while not (line := self._line(limit)).fresh(await line.stand(until)):
                    pass
        except (TimeoutError, LimitReached) as error:
            self.refused.add(limit.name)
            if isinstance(error, LimitReached):
                raise
            line = self._line(limit)
            raise line.refusal(limit.interval if line.answers else PATIENCE) from None
        self.permits.add(limit.name)

    async def _stop(self) -> None:
        for line in list(self._lines.values()):
            await line.stop()

    def _line(self, limit: Limit) -> Line:
        line = self._lines.get(limit)
        if line is None:
            self._forget_idle()
            line = self._lines[limit] = Line(limit, self)
        return line

    def _forget_idle(self) -> None:
        for limit in [limit for limit, line in self._lines.items() if line.idle]:
            del self._lines[limit]


def refusal(limit: Limit, why: str, seconds: float) -> LimitReached:
    text = f"the limit {limit.name!r} of {limit.rate} {why}: try again in {format_duration(float(f'{seconds:.2g}'))}"
    return LimitReached(text, retry_after=seconds)
