"""Breakers: what fails too often is left alone for a while, by all instances.

    async with breaker("harbour-office", failures=5, within="60s", rest="30s"):
        await client.post(…)

A breaker is a row of `breakers`, made by the first failure. Each transition is one statement that asks for what must be
true and says what is true after it. What it promises:

- `failures` exceptions that leave a body within `within`, on all instances together, open it. Cancelling a body is no
  failure, nor is what a limit or another breaker refuses in it.
- Open, it lets nobody in: `BreakerOpen` says for how long. Each opening in a row lasts twice as long as the one
  before, up to `REST_MOST`.
- When `rest` is over, exactly one body in the whole cluster is let in, the probe: whoever sets the row's token on,
  which only grows. Its success closes the breaker for all, its failure opens it again, and while it lasts all others
  are refused. The report of a probe whose token is out of date changes nothing.

    what happens                                the breaker
    the probe is cancelled                      the next one may probe at once
    the probe's result cannot be written        is told it again and again, until the next one may probe
    the answer that lets the probe in is lost   the next one may probe after `probe_timeout`
    its instance dies                           the next one may, as soon as that one is declared gone
    the probe takes longer than `probe_timeout`    the next one may; what the late one reports is refused
    a body that came in earlier fails while     does not count that
    it is open
    the database is away                        is as this instance knew it last; unknown, it lets everyone in: it is
                                                there to spare somebody, and nothing of ours depends on it

An instance keeps what it last knew, and a transition anywhere has all of them ask anew, by a notification. Closed, and
without a failure that still counts, it is believed for `CALM` while the link holds, so that it costs next to nothing;
otherwise for `BELIEVED`, and then the next use asks. Whoever was let in because a notification was lost, and fails, is
told so by the statement that counts it. When the link is up again, nothing is believed that was known before.

What it does not promise: that nothing comes in after it has opened. Bodies that are under way go on, and others hear of
it a moment later. Nor does it judge: what is not the other side's fault is to be raised outside of the body.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import psycopg

from app.fleet.background import Service, cancel_and_wait
from app.fleet.cluster.link import clock
from app.fleet.cluster.member import Member
from app.fleet.db.namespace import Statement
from app.fleet.db.pool import Database
from app.fleet.db.statements import fetch
from app.fleet.duration import Duration, format_duration
from app.fleet.errors import BreakerError, BreakerInvalid, BreakerOpen, DatabaseError, Fenced, LimitError
from app.fleet.telemetry.logs import events
from app.fleet.telemetry.metrics import ByName
from app.fleet.validation import check_count, check_duration, check_name

FAILURES_MOST = 1000
# What openings in a row double up to, unless `rest` is longer.
REST_MOST = 600.0
# For how long what is known is believed: while all is well, and otherwise.
CALM = 10.0
BELIEVED = 1.0
# How long a body waits for what the database says of its breaker.
PATIENCE = 1.0
AGAIN = 0.25
# More are kept in mind only while they are believed.
KNOWN_MOST = 1000

# What the fleet itself refuses inside of a body says nothing about the other side.
OURS = (BreakerError, LimitError, Fenced)

log = events(__name__)

# What every statement answers with: in how many seconds its rest is over, if it is not closed; and for how many seconds
# its failures count.
STATE = """extract(epoch FROM b.open_until - clock_timestamp())::float8 AS rests,
    extract(epoch FROM (SELECT max(at) FROM unnest(b.failed_at) AS at) - clock_timestamp())::float8
    + %(within)s::float8 AS counts"""

TELL = "pg_notify('{channel}', 'breaker:' || name)"

LOOK = Statement(f"SELECT {STATE} FROM {{schema}}.breakers AS b WHERE b.name = %(name)s")

MAKE = Statement("INSERT INTO {schema}.breakers (name) VALUES (%(name)s) ON CONFLICT (name) DO NOTHING")

# Of failures, only those that count are kept. The one that is enough opens it.
FAILED = Statement(f"""
WITH closed AS MATERIALIZED (
    SELECT name, failed_at
    FROM {{schema}}.breakers
    WHERE name = %(name)s AND open_until IS NULL
    FOR UPDATE
), counted AS MATERIALIZED (
    SELECT c.name,
           clock_timestamp() || ARRAY(
               SELECT at
               FROM unnest(c.failed_at) AS at
               WHERE at > clock_timestamp() - make_interval(secs => %(within)s::float8)
               ORDER BY at DESC
           ) AS failed_at
    FROM closed AS c
), opened AS MATERIALIZED (
    SELECT name, failed_at, cardinality(failed_at) >= %(failures)s AS enough FROM counted
), written AS (
    UPDATE {{schema}}.breakers AS b
    SET failed_at = CASE WHEN o.enough THEN '{{}}' ELSE o.failed_at END,
        open_until = CASE WHEN o.enough THEN clock_timestamp() + make_interval(secs => %(rest)s::float8) END,
        openings = CASE WHEN o.enough THEN 1 ELSE 0 END,
        token = b.token + CASE WHEN o.enough THEN 1 ELSE 0 END
    FROM opened AS o
    WHERE b.name = o.name
    RETURNING b.name, cardinality(b.failed_at) < 2 AS news, {STATE}
)
SELECT rests, counts, CASE WHEN news THEN {TELL} END FROM written
""")

# The guard of a probe: rested, and nobody else probes who may still come to an end.
PROBE = Statement("""
UPDATE {schema}.breakers AS b
SET token = b.token + 1, probe_instance = %(me)s,
    probe_until = clock_timestamp() + make_interval(secs => %(probe_timeout)s::float8)
WHERE b.name = %(name)s AND b.open_until <= clock_timestamp()
  AND (
      b.probe_instance IS NULL OR b.probe_until <= clock_timestamp()
      OR EXISTS (SELECT FROM {schema}.instances AS i WHERE i.id = b.probe_instance AND i.state = 'gone')
  )
RETURNING b.token
""")

MY_PROBE = "b.name = %(name)s AND b.token = %(token)s AND b.probe_instance IS NOT NULL"

PASSED = Statement(f"""
WITH closed AS (
    UPDATE {{schema}}.breakers AS b
    SET open_until = NULL, openings = 0, failed_at = '{{}}', probe_instance = NULL, probe_until = NULL
    WHERE {MY_PROBE}
    RETURNING b.name, {STATE}
)
SELECT rests, counts, {TELL} FROM closed
""")

OPENED_AGAIN = Statement(f"""
WITH opened AS (
    UPDATE {{schema}}.breakers AS b
    SET open_until = clock_timestamp() + make_interval(secs => least(
            %(rest)s::float8 * 2 ^ least(b.openings, 30), greatest(%(rest)s::float8, %(rest_most)s::float8)
        )),
        openings = b.openings + 1, token = b.token + 1, probe_instance = NULL, probe_until = NULL
    WHERE {MY_PROBE}
    RETURNING b.name, {STATE}
)
SELECT rests, counts, {TELL} FROM opened
""")

GIVEN_BACK = Statement(f"""
WITH free AS (
    UPDATE {{schema}}.breakers AS b
    SET probe_instance = NULL, probe_until = NULL
    WHERE {MY_PROBE}
    RETURNING b.name, {STATE}
)
SELECT rests, counts, {TELL} FROM free
""")

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Breaker:
    """What is asked for."""

    name: str
    failures: int
    within: float
    rest: float
    probe_timeout: float

    @classmethod
    def of(cls, name: str, failures: int, within: Duration, rest: Duration, probe_timeout: Duration) -> Self:
        check_name("breaker", name, BreakerInvalid)
        check_count("failures", failures, FAILURES_MOST, BreakerInvalid)
        durations = {"within": within, "rest": rest, "probe_timeout": probe_timeout}
        read = {option: check_duration(option, given, BreakerInvalid) for option, given in durations.items()}
        for option, value in read.items():
            if value == 0:
                raise BreakerInvalid(f"`{option}` is 0 s, and must be more")
        return cls(name, failures, **read)


@dataclass
class Known:
    """What this instance heard of a breaker, by its own clock."""

    heard: float
    # Until when it rests, if it is not closed; and until when a failure counts.
    rests_until: float | None = None
    counts_until: float = -math.inf
    # Somebody probes; not asked again before this.
    probed_until: float = -math.inf

    @property
    def closed(self) -> bool:
        return self.rests_until is None

    def believed(self, linked: bool) -> bool:
        now = clock()
        calm = self.closed and self.counts_until < now
        return now - self.heard < (CALM if calm and linked else BELIEVED)


class Breakers(Service):
    """The breakers that are used on this instance."""

    name = "breakers"

    def __init__(self, database: Database, member: Member) -> None:
        super().__init__()
        self.opened = ByName()
        self.closed = ByName()
        self.refused = ByName()
        self._database = database
        self._member = member
        self._known: dict[str, Known] = {}
        # One question for all who come in while it is asked.
        self._asking: dict[str, asyncio.Task[Known | None]] = {}
        # How often there was news: an answer that was on its way meanwhile may be older than that.
        self._news = 0
        self._errands: set[asyncio.Task[Any]] = set()
        member.on_notification("breaker", self._doubt)
        member.on_linked(self._doubt_all)

    @property
    def open(self) -> ByName:
        found = ByName()
        for name, known in self._known.items():
            found.add(name, 0 if known.closed else 1)
        return found

    @asynccontextmanager
    async def guard(self, breaker: Breaker) -> AsyncIterator[None]:
        """Let a body in, or refuse; and see how it ends."""
        token = await self._admit(breaker)
        try:
            yield
        except Exception as error:
            if not isinstance(error, OURS):
                await self._patiently(breaker, self._failed(breaker, token))
            elif token is not None:
                await self._patiently(breaker, self._report(GIVEN_BACK, breaker, token))
            raise
        except BaseException:
            if token is not None:
                self._errand(self._report(GIVEN_BACK, breaker, token))
            raise
        if token is not None:
            await self._patiently(breaker, self._report(PASSED, breaker, token))

    # -- coming in ----------------------------------------------------------------------------------------------------

    async def _admit(self, breaker: Breaker) -> int | None:
        """Return the token of the probe, if this is it."""
        known = await self._know(breaker)
        if known is None or known.rests_until is None:
            return None
        if known.rests_until <= clock() and known.probed_until <= clock():
            known.probed_until = clock() + BELIEVED
            token = await self._enter_as_probe(breaker)
            if token is not None:
                return token
            # Somebody else probes, or has; or nobody can say.
            known = await self._know(breaker, anew=True) or known
            known.probed_until = clock() + BELIEVED
        if known.rests_until is None:
            return None
        self.refused.add(breaker.name)
        raise refusal(breaker, known.rests_until - clock())

    async def _know(self, breaker: Breaker, *, anew: bool = False) -> Known | None:
        """Return what is known, or what the database says; None if neither says anything."""
        known = self._known.get(breaker.name)
        if known is not None and not anew and known.believed(self._member.holds()):
            return known
        asking = self._asking.get(breaker.name)
        if asking is None:
            asking = self._asking[breaker.name] = self._errand(self._look(breaker))
            asking.add_done_callback(lambda task: self._asked(breaker.name, task))
        done, _ = await asyncio.wait({asking}, timeout=PATIENCE)
        return asking.result() if done else known

    def _asked(self, name: str, asking: "asyncio.Task[Known | None]") -> None:
        if self._asking.get(name) is asking:
            del self._asking[name]

    async def _look(self, breaker: Breaker) -> Known | None:
        news, sent = self._news, clock()
        try:
            return await self._run(LOOK, breaker) or self._learn(breaker.name, Known(sent), news)
        except (psycopg.Error, DatabaseError) as error:
            log.debug("breaker.failed", breaker=breaker.name, reason=told(error))
            # As it was known; and not asked again by everyone who comes in.
            known = self._known.setdefault(breaker.name, Known(sent))
            known.heard, known.counts_until = sent, max(known.counts_until, sent + BELIEVED)
            return known

    async def _enter_as_probe(self, breaker: Breaker) -> int | None:
        """Ask to be the probe; if the caller is cancelled before the answer comes, that is given back."""
        probing = self._errand(self._quietly(breaker, self._probe(breaker)))

        def abandoned(_: object) -> None:
            if not probing.cancelled() and probing.exception() is None and (token := probing.result()) is not None:
                self._errand(self._report(GIVEN_BACK, breaker, token))

        try:
            return await asyncio.shield(probing)
        except asyncio.CancelledError:
            probing.add_done_callback(abandoned)
            raise

    async def _probe(self, breaker: Breaker) -> int | None:
        if (me := self._member.identity) is None:
            return None
        rows = await self._fetch(PROBE, breaker, me=me.id)
        return int(rows[0][0]) if rows else None

    # -- how it ended -------------------------------------------------------------------------------------------------

    async def _failed(self, breaker: Breaker, token: int | None) -> None:
        if token is not None:
            await self._report(OPENED_AGAIN, breaker, token)
            return
        known = self._known.get(breaker.name)
        if known is not None and not known.closed and known.believed(self._member.holds()):
            return
        known = await self._run(FAILED, breaker)
        # It is open already, which is good to know; or it never failed before, and has no row.
        if known is None and await self._run(LOOK, breaker) is None:
            await self._fetch(MAKE, breaker)
            known = await self._run(FAILED, breaker)
        if known is not None and not known.closed:
            self._opened(breaker, known)

    async def _report(self, statement: Statement, breaker: Breaker, token: int) -> None:
        """Write what became of a probe, for as long as nobody else may probe."""
        until = clock() + breaker.probe_timeout
        while True:
            try:
                await self._end_probe(statement, breaker, token)
            except (psycopg.Error, DatabaseError) as error:
                log.debug("breaker.failed", breaker=breaker.name, reason=told(error))
                if clock() > until:
                    return
                await asyncio.sleep(AGAIN)
            else:
                return

    async def _end_probe(self, statement: Statement, breaker: Breaker, token: int) -> None:
        known = await self._run(statement, breaker, token=token)
        if known is None:
            log.info("breaker.late", breaker=breaker.name, token=token)
        elif known.closed:
            self.closed.add(breaker.name)
            log.info("breaker.closed", breaker=breaker.name)
        elif statement is OPENED_AGAIN:
            self._opened(breaker, known)

    def _opened(self, breaker: Breaker, known: Known) -> None:
        assert known.rests_until is not None
        self.opened.add(breaker.name)
        log.warning("breaker.opened", breaker=breaker.name, seconds=round(known.rests_until - clock(), 1))

    # -- what is known ------------------------------------------------------------------------------------------------

    async def _run(self, statement: Statement, breaker: Breaker, **values: Any) -> Known | None:
        """Run one that answers with the state, and keep it in mind; None if it changed, or found, nothing."""
        news, sent = self._news, clock()
        rows = await self._fetch(statement, breaker, **values)
        if not rows:
            return None
        rests, counts = rows[0][:2]
        received = clock()
        known = Known(sent, None if rests is None else received + rests, received + (counts or -math.inf))
        return self._learn(breaker.name, known, news)

    def _learn(self, name: str, known: Known, news: int) -> Known:
        if news == self._news:
            if len(self._known) >= KNOWN_MOST and name not in self._known:
                linked = self._member.holds()
                self._known = {each: known for each, known in self._known.items() if known.believed(linked)}
            self._known[name] = known
        return known

    def _doubt(self, name: str) -> None:
        """Believe it no more, but keep it in mind: with the database away, it is still the last that was known."""
        self._news += 1
        if (known := self._known.get(name)) is not None:
            known.heard = -math.inf
        self._asking.pop(name, None)

    def _doubt_all(self) -> None:
        for name in list(self._known):
            self._doubt(name)
        self._news += 1
        self._asking.clear()

    # -- the service --------------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        for errand in list(self._errands):
            await cancel_and_wait(errand)

    # -- helpers ------------------------------------------------------------------------------------------------------

    async def _fetch(self, statement: Statement, breaker: Breaker, **values: Any) -> Any:
        async with self._database.autocommit() as connection:
            given = {**vars(breaker), "rest_most": REST_MOST, **values}
            return await fetch(connection, self._database.namespace.sql(statement), given)

    async def _patiently(self, breaker: Breaker, work: Coroutine[Any, Any, None]) -> None:
        """Wait for it a little; it goes on, whoever stops waiting."""
        await asyncio.wait({self._errand(self._quietly(breaker, work))}, timeout=PATIENCE)

    async def _quietly(self, breaker: Breaker, work: Coroutine[Any, Any, Answer]) -> Answer | None:
        try:
            return await work
        except (psycopg.Error, DatabaseError) as error:
            log.debug("breaker.failed", breaker=breaker.name, reason=told(error))
            return None

    def _errand(self, work: Coroutine[Any, Any, Answer]) -> "asyncio.Task[Answer]":
        errand = asyncio.create_task(work)
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)
        return errand


def refusal(breaker: Breaker, seconds: float) -> BreakerOpen:
    if seconds > 0:
        rest = format_duration(float(f"{seconds:.2g}"))
        text = f"{breaker.name!r} failed too often, and is left alone for another {rest}"
        return BreakerOpen(text, retry_after=seconds)
    return BreakerOpen(f"{breaker.name!r} failed too often, and somebody tries it just now", retry_after=BELIEVED)


def told(error: BaseException) -> str:
    return " ".join(str(error).split())
