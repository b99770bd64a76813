"""Circuit breakers that all instances share: what fails too often is not called for a while.

    async with breaker("harbour-office", failures=5, within="60s", rest="30s"):
        await client.post(…)

A breaker is a row of `breakers`, inserted by its first failure. Each transition is one statement that checks its
condition and returns the new state (`breaker_statements.py`).

Guarantees:

- A breaker opens when, on all instances together, `failures` exceptions have left a block within `within`. A cancelled
  block is not a failure, nor is a refusal by a limit or by another breaker.
- While it is open, it refuses every block with `BreakerOpen`, which says for how long. Each opening in a row lasts
  twice as long as the one before, up to `MAX_REST`.
- When `rest` is over, exactly one block in the whole cluster may enter: the probe, which increments the token of the
  row. If it succeeds, the breaker closes for all instances; if it fails, the breaker opens again. While it runs, all
  other blocks are refused. A probe with an old token cannot change the row.

    event                                       effect
    the probe is cancelled                      the next block may be the probe at once
    the probe's result cannot be written        it is tried again until the next block may be the probe
    the answer to entering as probe is lost     the next block may be the probe after `probe_timeout`
    the probe's instance dies                   the next block may be the probe when that instance is declared gone
    the probe takes longer than                 the next block may be the probe; the result of the late one is ignored
    `probe_timeout`
    an operator closes the breaker              all blocks may enter; the result of a probe that runs is ignored
    a block that entered earlier fails while    the failure is not counted
    the breaker is open
    the database is away                        the last state that this instance has read applies; without one, blocks
                                                may enter: a breaker spares another system, and no promise depends on it

An instance keeps the states that it has read, and each transition invalidates them on all instances by a notification.
A closed state without a failure that still counts is used for `CLOSED_LIFETIME` while the link is up, so a breaker
costs next to nothing. Any other state is used for `STATE_LIFETIME`, and then read again. If a notification is lost, and
a block enters an open breaker and fails, recording the failure reads the new state. When the link is up again, all
states are invalid.

Not guaranteed: that no block runs after the breaker has opened. Blocks that have entered continue, and other instances
receive the transition a moment later. The breaker counts every exception: raise what is not the fault of the other
system outside of the block.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import psycopg

from app.fleet.background import BackgroundTasks, Service
from app.fleet.cluster.link import clock
from app.fleet.cluster.member import Member
from app.fleet.coordination import breaker_statements as statements
from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Database
from app.fleet.db.pool.statements import fetch
from app.fleet.duration import Duration, format_duration
from app.fleet.errors import BreakerError, BreakerInvalid, BreakerOpen, DatabaseError, Fenced, LimitError
from app.fleet.telemetry.logs import event_log
from app.fleet.telemetry.metrics import ByName
from app.fleet.validation import check_count, check_duration, check_name

MAX_FAILURES = 1000
# Openings in a row double up to this, or up to `rest` if that is longer.
MAX_REST = 600.0
# For how long a state is used: if the breaker is closed and no failure counts, and otherwise.
CLOSED_LIFETIME = 10.0
STATE_LIFETIME = 1.0
# How long a block waits for the database.
DATABASE_TIMEOUT = 1.0
RETRY_INTERVAL = 0.25
# Above this number, states that may no longer be used are removed.
MAX_STATES = 1000

# Refusals by this library say nothing about the other system.
NOT_FAILURES = (BreakerError, LimitError, Fenced)

log = event_log(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Breaker:
    """The arguments of `breaker`."""

    name: str
    failures: int
    within: float
    rest: float
    probe_timeout: float

    @classmethod
    def of(cls, name: str, failures: int, within: Duration, rest: Duration, probe_timeout: Duration) -> Self:
        check_name("breaker", name, BreakerInvalid)
        check_count("failures", failures, MAX_FAILURES, BreakerInvalid)
        given = {"within": within, "rest": rest, "probe_timeout": probe_timeout}
        durations = {option: check_duration(option, duration, BreakerInvalid) for option, duration in given.items()}
        for option, seconds in durations.items():
            if seconds == 0:
                raise BreakerInvalid(f"`{option}` is 0 s, and must be more")
        return cls(name, failures, **durations)


@dataclass
class State:
    """The state of a breaker as this instance has read it, by this machine's clock."""

    read_at: float
    # Until when the breaker is open; None if it is closed.
    open_until: float | None = None
    # Until when the last failure counts.
    failure_until: float = -math.inf
    # Another block is the probe: this instance does not try to enter as probe before this.
    no_probe_until: float = -math.inf

    @property
    def closed(self) -> bool:
        return self.open_until is None

    def valid(self, linked: bool) -> bool:
        now = clock()
        calm = self.closed and self.failure_until < now
        return now - self.read_at < (CLOSED_LIFETIME if calm and linked else STATE_LIFETIME)


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
        self._states: dict[str, State] = {}
        # By name, the read in flight: one for all blocks that enter meanwhile.
        self._reads: dict[str, asyncio.Task[State | None]] = {}
        # How many notifications came in. A state whose read began before one of them may be outdated, and is not kept.
        self._invalidations = 0
        self._background = BackgroundTasks()
        member.on_notification("breaker", self._invalidate)
        member.on_linked(self._invalidate_all)

    @property
    def open(self) -> ByName:
        counts = ByName()
        for name, state in self._states.items():
            counts.add(name, 0 if state.closed else 1)
        return counts

    @asynccontextmanager
    async def guard(self, breaker: Breaker) -> AsyncIterator[None]:
        """Let a block enter, or raise `BreakerOpen`; then record how the block ended."""
        token = await self._enter(breaker)
        try:
            yield
        except Exception as error:
            if not isinstance(error, NOT_FAILURES):
                await self._wait_briefly(breaker, self._failed(breaker, token))
            elif token is not None:
                await self._wait_briefly(breaker, self._end_probe(statements.PROBE_ABANDONED, breaker, token))
            raise
        except BaseException:
            if token is not None:
                self._abandon_probe(breaker, token)
            raise
        if token is not None:
            await self._wait_briefly(breaker, self._end_probe(statements.PROBE_SUCCEEDED, breaker, token))

    async def _stop(self) -> None:
        await self._background.stop()

    # -- entering -----------------------------------------------------------------------------------------------------

    async def _enter(self, breaker: Breaker) -> int | None:
        """Return if the block may enter, with the token if it is the probe; otherwise raise."""
        state = await self._state(breaker)
        if state is None or state.open_until is None:
            return None
        if state.open_until <= clock() and state.no_probe_until <= clock():
            state.no_probe_until = clock() + STATE_LIFETIME
            work = self._log_errors(breaker, self._try_to_probe(breaker))
            token = await self._background.finish_or_undo(work, partial(self._abandon_probe, breaker))
            if token is not None:
                return token
            # Another block is the probe, or was; or the database is away.
            state = await self._state(breaker, read=True) or state
            state.no_probe_until = clock() + STATE_LIFETIME
        if state.open_until is None:
            return None
        self.refused.add(breaker.name)
        raise refusal(breaker, state.open_until - clock())

    async def _try_to_probe(self, breaker: Breaker) -> int | None:
        if (me := self._member.identity) is None:
            return None
        rows = await self._fetch(statements.ENTER_AS_PROBE, breaker, me=me.id)
        return int(rows[0][0]) if rows else None

    # -- recording the end of a block ---------------------------------------------------------------------------------

    async def _failed(self, breaker: Breaker, token: int | None) -> None:
        if token is not None:
            await self._end_probe(statements.PROBE_FAILED, breaker, token)
            return
        state = self._states.get(breaker.name)
        if state is not None and not state.closed and state.valid(self._member.holds()):
            return
        state = await self._run(statements.COUNT_FAILURE, breaker)
        # Without a state, the breaker is open already, or has no row yet.
        if state is None and await self._run(statements.READ, breaker) is None:
            await self._fetch(statements.INSERT, breaker)
            state = await self._run(statements.COUNT_FAILURE, breaker)
        if state is not None and not state.closed:
            self._report_opened(breaker, state)

    def _abandon_probe(self, breaker: Breaker, token: int) -> None:
        self._background.start(self._end_probe(statements.PROBE_ABANDONED, breaker, token))

    async def _end_probe(self, statement: Statement, breaker: Breaker, token: int) -> None:
        """Write the result of a probe; try again until another block may be the probe."""
        until = clock() + breaker.probe_timeout
        while True:
            try:
                state = await self._run(statement, breaker, token=token)
                break
            except (psycopg.Error, DatabaseError) as error:
                log_failure(breaker, error)
                if clock() > until:
                    return
                await asyncio.sleep(RETRY_INTERVAL)
        if state is None:
            log.info("breaker.late", breaker=breaker.name, token=token)
        elif state.closed:
            self.closed.add(breaker.name)
            log.info("breaker.closed", breaker=breaker.name)
        elif statement is statements.PROBE_FAILED:
            self._report_opened(breaker, state)

    def _report_opened(self, breaker: Breaker, state: State) -> None:
        assert state.open_until is not None
        self.opened.add(breaker.name)
        log.warning("breaker.opened", breaker=breaker.name, seconds=round(state.open_until - clock(), 1))

    # -- states -------------------------------------------------------------------------------------------------------

    async def _state(self, breaker: Breaker, *, read: bool = False) -> State | None:
        """Return the state if it is valid, or read it; None if it is unknown and the database does not answer."""
        state = self._states.get(breaker.name)
        if state is not None and not read and state.valid(self._member.holds()):
            return state
        reading = self._reads.get(breaker.name)
        if reading is None:
            reading = self._reads[breaker.name] = self._background.start(self._read(breaker))
            reading.add_done_callback(lambda task: self._read_ended(breaker.name, task))
        done, _ = await asyncio.wait({reading}, timeout=DATABASE_TIMEOUT)
        return reading.result() if done else state

    def _read_ended(self, name: str, reading: "asyncio.Task[State | None]") -> None:
        if self._reads.get(name) is reading:
            del self._reads[name]

    async def _read(self, breaker: Breaker) -> State | None:
        invalidations, sent = self._invalidations, clock()
        try:
            return await self._run(statements.READ, breaker) or self._keep(breaker.name, State(sent), invalidations)
        except (psycopg.Error, DatabaseError) as error:
            log_failure(breaker, error)
            # The last state is used for `STATE_LIFETIME`, so that not every block reads it.
            state = self._states.setdefault(breaker.name, State(sent))
            state.read_at, state.failure_until = sent, max(state.failure_until, sent + STATE_LIFETIME)
            return state

    async def _run(self, statement: Statement, breaker: Breaker, **values: Any) -> State | None:
        """Run a statement that returns the state, and keep the state; None if the statement returned no row."""
        invalidations, sent = self._invalidations, clock()
        rows = await self._fetch(statement, breaker, **values)
        if not rows:
            return None
        open_seconds, failure_seconds = rows[0][:2]
        received = clock()
        open_until = None if open_seconds is None else received + open_seconds
        state = State(sent, open_until, received + (failure_seconds or -math.inf))
        return self._keep(breaker.name, state, invalidations)

    def _keep(self, name: str, state: State, invalidations: int) -> State:
        if invalidations == self._invalidations:
            if len(self._states) >= MAX_STATES and name not in self._states:
                linked = self._member.holds()
                self._states = {each: known for each, known in self._states.items() if known.valid(linked)}
            self._states[name] = state
        return state

    def _invalidate(self, name: str) -> None:
        """Make a state invalid, but keep it: while the database is away, it is still the last one known."""
        self._invalidations += 1
        if (state := self._states.get(name)) is not None:
            state.read_at = -math.inf
        self._reads.pop(name, None)

    def _invalidate_all(self) -> None:
        for name in list(self._states):
            self._invalidate(name)
        self._invalidations += 1
        self._reads.clear()

    # -- helpers ------------------------------------------------------------------------------------------------------

    async def _fetch(self, statement: Statement, breaker: Breaker, **values: Any) -> Any:
        async with self._database.autocommit() as connection:
            given = {**vars(breaker), "max_rest": MAX_REST, **values}
            return await fetch(connection, self._database.namespace.sql(statement), given)

    async def _wait_briefly(self, breaker: Breaker, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work for `DATABASE_TIMEOUT`; it continues after that, and if the caller is cancelled."""
        await asyncio.wait({self._background.start(self._log_errors(breaker, work))}, timeout=DATABASE_TIMEOUT)

    async def _log_errors(self, breaker: Breaker, work: Coroutine[Any, Any, Result]) -> Result | None:
        try:
            return await work
        except (psycopg.Error, DatabaseError) as error:
            log_failure(breaker, error)
            return None


def refusal(breaker: Breaker, seconds: float) -> BreakerOpen:
    if seconds > 0:
        rest = format_duration(float(f"{seconds:.2g}"))
        text = f"{breaker.name!r} failed too often, and is not called for another {rest}"
        return BreakerOpen(text, retry_after=seconds)
    return BreakerOpen(f"{breaker.name!r} failed too often, and a probe is under way", retry_after=STATE_LIFETIME)


def log_failure(breaker: Breaker, error: BaseException) -> None:
    log.debug("breaker.failed", breaker=breaker.name, reason=" ".join(str(error).split()))
