"""The statements of the run writer, each for a batch: execute it, then find out about the rows that it did not change.

A row was not changed for one of three reasons, and `Outcome` has a list for each:

    written    an earlier statement changed it, whose answer was lost: it carries our token, and a claim draws a token
               only once (`runs/end.py`, CONFIRM)
    locked     another transaction has locked it: a transaction that the run guards, or a user's own
    fenced     the run was taken over: it is no longer running, or has a higher token
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import psycopg
from sqlalchemy.exc import DBAPIError

from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Connection, DatabaseAway, shows_an_outage
from app.fleet.db.pool.statements import array
from app.fleet.engine.execute.attempt import Attempt
from app.fleet.errors import Fenced
from app.fleet.runs.attempt_writes import CHECKPOINT, STILL_OURS, STORE_TRACEBACKS
from app.fleet.runs.effects import events
from app.fleet.runs.effects.events import Event
from app.fleet.runs.effects.notifications import WAITING_HEADING, returned_heading
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.end import CONFIRM, END_CANCELLED, FINISH, FINISH_SKIP_LOCKED
from app.fleet.runs.requeue import REQUEUE

REFUSED = "PostgreSQL refused what it wrote:"
# Characters of the error beside a stored traceback.
MAX_HEADLINE = 500
# Serialization failure, deadlock, lock timeout, cancelled statement: the values are not at fault.
TRANSIENT = {"40001", "40P01", "55P03", "57014"}
# The class of "program limit exceeded": sending it again would exceed it again, although psycopg calls it operational.
LIMIT_EXCEEDED = "54"


class Ended(NamedTuple):
    attempt: Attempt
    # None for `succeeded`, which nearly all are.
    state: RunState | None
    result: str | None
    error: str | None


class Returned(NamedTuple):
    """The run of this attempt becomes pending again."""

    attempt: Attempt
    # A pause gives the attempt back: it does not count.
    paused: bool
    # Seconds; None for the delay of the action.
    delay: float | None
    error: str | None


class Checkpoint(NamedTuple):
    attempt: Attempt
    text: str
    # Its result: stored, or `Fenced`.
    stored: "asyncio.Future[None]"


class Emitted(NamedTuple):
    attempt: Attempt
    event: Event


Write = TypeVar("Write", Ended, Returned, Checkpoint)


@dataclass
class Outcome(Generic[Write]):
    written: Sequence[Write]
    locked: list[Write] = field(default_factory=list)
    fenced: list[Write] = field(default_factory=list)
    # The ids of runs that ended instead of becoming pending, because their cancellation was requested.
    cancelled: set[int] = field(default_factory=set)


@dataclass
class EventsOutcome:
    written: dict[Attempt, list[Event]]
    locked: dict[Attempt, list[Event]] = field(default_factory=dict)
    fenced: list[Attempt] = field(default_factory=list)


async def append_events(
    connection: Connection, namespace: Namespace, batch: Sequence[Emitted], *, sent_before: bool
) -> EventsOutcome:
    by_attempt: dict[Attempt, list[Event]] = {}
    for attempt, event in batch:
        by_attempt.setdefault(attempt, []).append(event)
    # With the number of events that each run has now: a batch that is sent again is written once.
    numbered = [
        Event(event.run_id, event.token, event.kind, event.data, before=attempt.events) for attempt, event in batch
    ]
    stale = await events.append(connection, namespace, numbered)
    outcome = EventsOutcome(by_attempt)
    unchanged = [attempt for attempt in by_attempt if (attempt.run_id, attempt.token) in stale]
    counts = await still_ours(connection, namespace, unchanged) if unchanged else {}
    for attempt in unchanged:
        count = counts.get(attempt.run_id)
        if count == attempt.events:
            outcome.locked[attempt] = by_attempt.pop(attempt)
        elif not sent_before or count != attempt.events + len(by_attempt[attempt]):
            outcome.fenced.append(attempt)
    return outcome


async def store_checkpoints(
    connection: Connection, namespace: Namespace, batch: Sequence[Checkpoint]
) -> Outcome[Checkpoint]:
    # Only the last checkpoint of a run counts: a statement may change a row only once.
    latest = {(each.attempt.run_id, each.attempt.token): each.text for each in batch}
    values = {
        "ids": [run_id for run_id, _ in latest],
        "tokens": [token for _, token in latest],
        "states": list(latest.values()),
    }
    written = set(await (await connection.execute(namespace.sql(CHECKPOINT), values)).fetchall())
    if len(written) == len(latest):
        return Outcome(batch)
    unchanged = [each.attempt for each in batch if (each.attempt.run_id, each.attempt.token) not in written]
    ours = await still_ours(connection, namespace, unchanged)
    outcome: Outcome[Checkpoint] = Outcome([])
    done: list[Checkpoint] = []
    for each in batch:
        if (each.attempt.run_id, each.attempt.token) in written:
            done.append(each)
        elif each.attempt.run_id in ours:
            outcome.locked.append(each)
        else:
            outcome.fenced.append(each)
    outcome.written = done
    return outcome


async def store_tracebacks(
    connection: Connection, namespace: Namespace, batch: Sequence[Returned] | Sequence[Ended]
) -> None:
    """Store the tracebacks of failed attempts, before the statement after which these runs are no longer theirs."""
    failed = [each for each in batch if each.attempt.traceback is not None]
    if not failed:
        return
    values = {
        "ids": [each.attempt.run_id for each in failed],
        "tokens": [each.attempt.token for each in failed],
        "errors": [(each.error or "")[:MAX_HEADLINE] for each in failed],
        "tracebacks": [each.attempt.traceback for each in failed],
    }
    await connection.execute(namespace.sql(STORE_TRACEBACKS), values)
    for each in failed:
        each.attempt.traceback = None


async def requeue(
    connection: Connection, namespace: Namespace, batch: Sequence[Returned], version: str, *, sent_before: bool
) -> Outcome[Returned]:
    """Make runs pending again; `version` is the release of this instance."""
    await store_tracebacks(connection, namespace, batch)
    values = {
        "ids": [each.attempt.run_id for each in batch],
        "tokens": [each.attempt.token for each in batch],
        "pauses": [each.paused for each in batch],
        "delays": [each.delay for each in batch],
        "errors": [each.error for each in batch],
        "heading": returned_heading(version) if any(each.paused for each in batch) else WAITING_HEADING,
    }
    rows = await (await connection.execute(namespace.sql(REQUEUE), values)).fetchall()
    if len(rows) == len(batch):
        return Outcome(batch)
    written = {row[0] for row in rows}
    unchanged = [each for each in batch if each.attempt.run_id not in written]
    cancelled = await end_cancelled(connection, namespace, unchanged)
    outcome = await sort_out(connection, namespace, batch, written | cancelled, returned=sent_before)
    outcome.cancelled = cancelled
    return outcome


async def end_cancelled(connection: Connection, namespace: Namespace, batch: Sequence[Returned]) -> set[int]:
    """End the runs whose cancellation was requested, instead of requeueing them; return their ids."""
    values = {
        "ids": [each.attempt.run_id for each in batch],
        "tokens": [each.attempt.token for each in batch],
        "states": [RunState.CANCELLED] * len(batch),
        "results": [None] * len(batch),
        "errors": ["cancelled on request" + (f"; {each.error}" if each.error else "") for each in batch],
    }
    return {row[0] for row in await (await connection.execute(namespace.sql(END_CANCELLED), values)).fetchall()}


async def finish(
    connection: Connection, namespace: Namespace, batch: Sequence[Ended], *, plain: bool
) -> Outcome[Ended]:
    """End runs. `plain` says that all of them succeeded, without a result."""
    if not plain:
        await store_tracebacks(connection, namespace, batch)
    values: dict[str, Any] = {
        "ids": array([each.attempt.run_id for each in batch]),
        "tokens": array([each.attempt.token for each in batch]),
        "states": None if plain else [each.state for each in batch],
        "results": None if plain else [each.result for each in batch],
        "errors": None if plain else [each.error for each in batch],
    }
    try:
        cursor = await connection.execute(namespace.sql(FINISH), values)
    except psycopg.errors.LockNotAvailable:
        cursor = await connection.execute(namespace.sql(FINISH_SKIP_LOCKED), values)
    if cursor.rowcount == len(batch):
        return Outcome(batch)
    return await sort_out(connection, namespace, batch, set(), returned=False)


async def sort_out(
    connection: Connection, namespace: Namespace, batch: Sequence[Write], written: set[int], *, returned: bool
) -> Outcome[Write]:
    """Tell why the statement has not changed the rows of the runs that are not in `written`.

    `returned` says that an earlier statement may have made them pending.
    """
    missing = [each for each in batch if each.attempt.run_id not in written]
    # In this order: a run that has not ended when the first statement looks may have ended when the second one does.
    ours = await still_ours(connection, namespace, [each.attempt for each in missing])
    values = {
        "ids": [each.attempt.run_id for each in missing],
        "tokens": [each.attempt.token for each in missing],
        "returned": returned,
    }
    rows = await (await connection.execute(namespace.sql(CONFIRM), values)).fetchall()
    done = written | {row[0] for row in rows}
    left = [each for each in missing if each.attempt.run_id not in done]
    return Outcome(
        written=[each for each in batch if each.attempt.run_id in done],
        locked=[each for each in left if each.attempt.run_id in ours],
        fenced=[each for each in left if each.attempt.run_id not in ours],
    )


async def still_ours(connection: Connection, namespace: Namespace, attempts: Sequence[Attempt]) -> dict[int, int]:
    """Return the number of events of each run that still runs with the token of its attempt, by its id."""
    values = {"ids": [each.run_id for each in attempts], "tokens": [each.token for each in attempts]}
    return dict(await (await connection.execute(namespace.sql(STILL_OURS), values)).fetchall())


def worth_repeating(error: BaseException) -> bool:
    """Return whether sending a batch again can succeed: an outage, or a conflict with another transaction."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        error = error.orig
    if isinstance(error, psycopg.Error) and error.sqlstate in TRANSIENT:
        return True
    if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith(LIMIT_EXCEEDED):
        return False
    return isinstance(error, DatabaseAway | psycopg.OperationalError | psycopg.InterfaceError) or shows_an_outage(error)


def fenced(attempt: Attempt) -> Fenced:
    return Fenced(
        f"run {attempt.run_id} was taken over from this attempt (token {attempt.token}): PostgreSQL keeps nothing that "
        f"it writes"
    )


def may_fail(write: Ended | Returned | Emitted) -> bool:
    """Return whether the run can be recorded as failed instead; not if that is what PostgreSQL refused."""
    if isinstance(write, Returned):
        return not write.paused
    return isinstance(write, Ended) and not (write.error or "").startswith(REFUSED)
