"""The writer: everything an attempt writes about its run, in batches, and never with an old token.

One writer for each instance, on a connection of its own. While a batch is on its way, the next one fills: a lone run
is written at once, a flood in batches of `BATCH`. In each round it writes, in this order:

    events, checkpoints     what a run said before it ended must be there before its end is
    runs given back         a retry, a pause: `pending` again
    runs that ended         moved from `runs` to `finished_runs`, in one statement

A round takes a fair share of events from each run that has any, and holds back the ends of those runs alone that have
more. So a run that emits without end delays nobody else: it fills its own `UNWRITTEN_MOST` and waits in `emit`.

No statement waits for a row that another transaction has locked: one that is guarded by the run, or a user's own. Each
locks its rows first and skips those that are locked. The statement that ends runs does so only if it has had to wait
(`FINISH`). What was skipped stays with the writer and is written `HELD_FOR` later. So a transaction that stays open
delays the run whose row it holds, and no other.

Every statement asks for `(id, token)` and the state `running`. A row that is not found was taken over: that write is
refused, counted, and whoever still works on the run is stopped. Unless it is our own write come back: when a
connection breaks under a statement, nobody knows whether it happened, so it is sent again, and what is missing then
may simply be done. `CONFIRM` tells the two apart: what we ended bears our token, and nobody else can have that. Of
events, `STILL_OURS` does: they move the run's counter from where we know it to be (`runs/events.py`).

    failure                                   what happens
    process dies before the statement         the run is taken over and attempted again
    process dies after it                     done
    database away                             the batch waits, and with it its runs' slots; tried again until it is back
    a value PostgreSQL refuses                the batch is halved until the culprit is alone, and that one run fails

A slot is free when its run's end is durable, and not before: an instance cannot claim faster than it can complete.

What it does not promise: that an event which was not yet written survives the death of the process.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.background import cancel_and_wait
from app.fleet.db.namespace import Statement
from app.fleet.db.pool import Connection, Database, DatabaseAway, shows_an_outage
from app.fleet.db.statements import array, fetch
from app.fleet.engine.execute.run import STATE_MOST, Run, as_json
from app.fleet.errors import EngineError, Fenced
from app.fleet.runs import events as stream
from app.fleet.runs.end import FEED_INSERT_ENDED, INSERT_FINISHED
from app.fleet.runs.events import Event
from app.fleet.runs.feed import feed_insert_sql
from app.fleet.runs.notifications import notify_sql
from app.fleet.runs.retry_delay import usual_wait
from app.fleet.runs.states import is_running
from app.fleet.stream.relay import CHANGED, EMITTED, Relay
from app.fleet.telemetry.logs import events
from app.fleet.telemetry.redaction import describe, redact

Answer = TypeVar("Answer")

OUTCOMES = ("succeeded", "failed", "cancelled", "retried", "paused")
# What can be refused for its token.
WRITES = ("completion", "checkpoint", "event", "guard", "commit", "once")

BATCH = 1000
RETRY = 0.1
# How long the statement that ends runs waits for a row that another transaction has locked.
LOCK_WAIT_MS = 10
# How long a run whose row another transaction has locked is left alone.
HELD_FOR = 0.25
AFTER_DEFECT = 1.0
# Events of one run in a batch, before the next run's turn.
SHARE = 10
# Characters of events in one statement.
BATCH_WEIGHT = 4_194_304
# Events of one run, and their characters, that wait to be written before its `emit` waits.
UNWRITTEN_MOST = 500
UNWRITTEN_WEIGHT = 1_048_576
# Events that a run may have, its changes of state among them.
EVENTS_MOST = 100_000
REFUSED = "what it wrote was refused by PostgreSQL:"
ERROR_MOST = 10_000
# Deadlock, serialization failure: try again, nothing is wrong with the values.
TRANSIENT = {"40001", "40P01", "55P03", "57014"}
# The class of what exceeds a limit of PostgreSQL's: it would exceed it again, although the driver calls it operational.
TOO_MUCH = "54"

log = events(__name__)


# Here and below, a row is looked for by its id and nothing else, whatever the planner thinks of the table just then:
# while it is empty, walking through an index of it seems to cost nothing, and under a snapshot that is a long walk.
# Hence `= ANY` beside the join, and `is_running`, which leads into no partial index.
def finish(which: str, before: str = "") -> str:
    """Return the statement that ends those of the runs that `which` says; `before` is a CTE that it needs."""
    return f"""
WITH {before}ended AS (
    SELECT *
    FROM unnest(%(ids)s::int8[], %(tokens)s::int8[], %(states)s::text[], %(results)s::text[], %(errors)s::text[])
         AS e (id, token, state, result, error)
), gone AS (
    DELETE FROM {{schema}}.runs AS r
    USING ended AS e
    WHERE {which} AND r.id = e.id AND r.token = e.token AND {is_running()}
    RETURNING r.*, coalesce(e.state, 'succeeded') AS ended_as, e.result AS ended_with, e.error AS ended_by
), noted AS (
    {FEED_INSERT_ENDED}
)
{INSERT_FINISHED}"""


def finish_unlocked(which: str = "true") -> str:
    """Return the statement that ends runs, and leaves out those whose rows another transaction has locked."""
    before = f"""own AS MATERIALIZED (
    SELECT r.id
    FROM {{schema}}.runs AS r
    WHERE r.id = ANY (%(ids)s::int8[]) AND {is_running()} AND {which}
    FOR UPDATE SKIP LOCKED
), """
    return finish("r.id = ANY (ARRAY(SELECT id FROM own))", before)


GIVEN = "r.id = ANY (%(ids)s::int8[])"
# Nearly always no other transaction has locked one of these rows. To lock each of them first would take a tenth of the
# statement's time, so the first attempt does not: it fails if it has to wait, and `FINISH_UNLOCKED` is sent instead.
FINISH = Statement(finish(f"(SELECT set_config('lock_timeout', '{LOCK_WAIT_MS}', true)) <> '' AND {GIVEN}"))
FINISH_UNLOCKED = Statement(finish_unlocked())
# In the transaction of the run's effects, which is the caller's own: it waits for another one that the run guards.
COMPLETE = Statement(finish(GIVEN) + "RETURNING id")
# Instead of giving them back: they would wait for their delay, and then end without being run.
END_CANCELLED = Statement(finish_unlocked("r.cancel_requested_at IS NOT NULL") + "RETURNING id")

# Back to `pending`. A retry waits for its delay, or as its action says; a pause goes on where it was, as if it had not
# been claimed.
GIVE_BACK = Statement(f"""
WITH own AS MATERIALIZED (
    SELECT r.id
    FROM {{schema}}.runs AS r
    WHERE r.id = ANY (%(ids)s::int8[]) AND {is_running()} AND r.cancel_requested_at IS NULL
    FOR NO KEY UPDATE SKIP LOCKED
), back AS (
    UPDATE {{schema}}.runs AS r
    SET state = 'pending',
        run_at = CASE
            WHEN b.paused THEN r.run_at
            ELSE clock_timestamp() + make_interval(secs => coalesce(b.delay, {usual_wait()}))
        END,
        attempt = r.attempt - b.paused::int,
        error = coalesce(b.error, r.error),
        events = r.events + 1,
        deadline_at = NULL
    FROM unnest(%(ids)s::int8[], %(tokens)s::int8[], %(pauses)s::bool[], %(delays)s::float8[], %(errors)s::text[])
         AS b (id, token, paused, delay, error)
    WHERE r.id = ANY (ARRAY(SELECT id FROM own)) AND r.id = b.id AND r.token = b.token AND {is_running()}
    RETURNING {stream.EVENT_COLUMNS}, r.action_id, r.priority, r.attempt + b.paused::int AS ran, b.error AS why
), written AS (
    {stream.event_insert_sql("back")}
), noted AS (
    {feed_insert_sql("back", "'pending'")}
), told AS (
    {notify_sql("back")}
)
SELECT id FROM back, (SELECT count(*) FROM told) AS t
""")

CHECKPOINT = Statement(f"""
WITH own AS MATERIALIZED (
    SELECT r.id
    FROM {{schema}}.runs AS r
    WHERE r.id = ANY (%(ids)s::int8[]) AND {is_running()}
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {{schema}}.runs AS r
SET checkpoint = c.state::json
FROM unnest(%(ids)s::int8[], %(tokens)s::int8[], %(states)s::text[]) AS c (id, token, state)
WHERE r.id = ANY (ARRAY(SELECT id FROM own)) AND r.id = c.id AND r.token = c.token AND {is_running()}
RETURNING r.id, r.token
""")

# Which of these ended, or went back, with the very token we had. A token is drawn once, so it was we who did it.
CONFIRM = Statement("""
SELECT w.id
FROM unnest(%(ids)s::int8[], %(tokens)s::int8[]) AS w (id, token)
WHERE EXISTS (SELECT FROM {schema}.finished_runs AS f WHERE f.id = w.id AND f.token = w.token)
   OR (%(returned)s AND EXISTS (
       SELECT FROM {schema}.runs AS r WHERE r.id = w.id AND r.token = w.token AND r.state = 'pending'
   ))
""")

# Which of these still run with the very token we had, and how many events each has: their rows were skipped; or we
# have written their events, in a statement whose answer was lost.
STILL_OURS = Statement(f"""
SELECT r.id, r.events
FROM {{schema}}.runs AS r
JOIN unnest(%(ids)s::int8[], %(tokens)s::int8[]) AS w (id, token) USING (id, token)
WHERE r.id = ANY (%(ids)s) AND {is_running()}
""")

# KEY SHARE: a statement that takes the run back locks its row FOR UPDATE and skips the row while this lock is held. A
# checkpoint updates no key column, so it does not conflict with this lock.
GUARD = Statement(f"""
SELECT id FROM {{schema}}.runs AS r WHERE id = %(id)s AND token = %(token)s AND {is_running()} FOR KEY SHARE
""")


class Ended(NamedTuple):
    run: Run[Any]
    # None for `succeeded`, which nearly all are.
    state: str | None
    result: str | None
    error: str | None


class Returned(NamedTuple):
    run: Run[Any]
    # A pause takes the attempt back.
    paused: bool
    # None for the usual wait.
    delay: float | None
    error: str | None


class Kept(NamedTuple):
    run: Run[Any]
    state: str
    done: "asyncio.Future[None]"


AnyEnd = TypeVar("AnyEnd", Ended, Returned)
AnyWrite = TypeVar("AnyWrite", Ended, Returned, Kept)


class RunWriter:
    """Appended to by the executor and the handles; written by its own task."""

    def __init__(
        self,
        database: Database,
        relay: Relay,
        on_settled: Callable[[Sequence[Run[Any]]], None],
        on_fenced: Callable[[Run[Any]], None],
    ) -> None:
        """`on_settled` is told which runs are done with, durably; `on_fenced` of one that goes on without right."""
        self.stopping = asyncio.Event()
        self.fenced: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self._database = database
        self._relay = relay
        self._sql = database.namespace.sql
        self._settled = on_settled
        self._on_fenced = on_fenced
        self._lane = database.dedicated()
        self._ended: list[Ended] = []
        self._returned: list[Returned] = []
        self._kept: list[Kept] = []
        # Each run's unwritten events. The run whose turn comes last is last.
        self._events: dict[Run[Any], deque[Event]] = {}
        # Runs whose rows another transaction has locked, for the moment.
        self._held: set[Run[Any]] = set()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        # Replaced with each round: set when that round has ended.
        self._round = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- what an attempt says -----------------------------------------------------------------------------------------

    def succeeded(self, run: Run[Any], result: str | None) -> None:
        run.recorded = True
        self._ended.append(Ended(run, None, result, None))
        self._work.set()

    def failed(self, run: Run[Any], error: str) -> None:
        self._end_badly(run, "failed", error)

    def cancelled(self, run: Run[Any], error: str) -> None:
        self._end_badly(run, "cancelled", error)

    def retry(self, run: Run[Any], delay: float | None, error: str) -> None:
        """Have it tried again after `delay` seconds; without it, after the usual wait of its action."""
        self._give(Returned(run, False, delay, storable(error)))

    def paused(self, run: Run[Any]) -> None:
        self._give(Returned(run, True, None, None))

    def _end_badly(self, run: Run[Any], state: str, error: str) -> None:
        self._ended.append(Ended(run, state, None, storable(error)))
        run.recorded = True
        self._work.set()

    def _give(self, returned: Returned) -> None:
        self._returned.append(returned)
        returned.run.recorded = True
        self._work.set()

    async def checkpoint(self, run: Run[Any], state: str) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kept.append(Kept(run, state, done))
        self._work.set()
        await done

    async def emit(self, run: Run[Any], kind: str, data: str | None) -> None:
        while run.said >= UNWRITTEN_MOST or run.said_weight >= UNWRITTEN_WEIGHT:
            await self._until_round_ends()
        if run.ending == "fenced" or run.recorded:
            self.refuse(run, "event")
            raise fenced(run)
        if run.events + run.said >= EVENTS_MOST:
            raise EngineError(
                f"run {run.id} has {EVENTS_MOST} events, and may have no more: emit less often, or keep what there is "
                f"to say in a table of your own"
            )
        event = Event(run.id, run.token, kind, data)
        run.said += 1
        run.said_weight += event.weight
        self._events.setdefault(run, deque()).append(event)
        self._work.set()

    @asynccontextmanager
    async def committing(self, run: Run[Any]) -> AsyncIterator[AsyncSession]:
        async with self._database.session() as session:
            yield session
        self._relay.notify(CHANGED, [run.id])

    async def complete_in(self, session: AsyncSession, run: Run[Any]) -> None:
        """Complete a run in the transaction of its effects. Its events first: they must be there before its end."""
        while run.said:
            await self._until_round_ends()
        result = None if run.result is None else as_json(run.result, "the result", STATE_MOST)
        values = {"ids": [run.id], "tokens": [run.token], "states": None, "results": [result], "errors": None}
        # Asked for the id, because SQLAlchemy does not tell how many rows a statement without any changed.
        if not await fetch(session, self._sql(COMPLETE), values):
            self.refuse(run, "commit")
            raise fenced(run)

    async def guard(self, session: AsyncSession, run: Run[Any]) -> None:
        if not await fetch(session, self._sql(GUARD), {"id": run.id, "token": run.token}):
            self.refuse(run, "guard")
            raise fenced(run)

    def wait_from_thread(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Let the event loop do something for a thread."""
        assert self._loop is not None
        if asyncio._get_running_loop() is not None:  # noqa: SLF001 — the public one raises where there is none
            work.close()
            raise RuntimeError("`run.blocking` is for plain functions; an async action awaits the run's own methods")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # -- the writer ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._write_for_ever(), name="writer")

    async def empty(self) -> None:
        """Wait until everything said so far is written."""
        while self._busy():
            self._work.set()
            await self._idle.wait()
            await asyncio.sleep(RETRY if self._held else 0)

    async def _until_round_ends(self) -> None:
        self._work.set()
        await self._round.wait()

    async def stop(self) -> None:
        await cancel_and_wait(self._task)
        await self._lane.close()

    def _busy(self) -> bool:
        return bool(self._ended or self._returned or self._kept or self._events) or not self._idle.is_set()

    async def _write_for_ever(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            self._idle.clear()
            try:
                await self._write_round()
            except Exception as error:  # noqa: BLE001 — a defect of ours must not end it for good
                log.error("engine.defect", error=error, service="writer")
                await asyncio.sleep(AFTER_DEFECT)
            finally:
                self._idle.set()
                self._round.set()
                self._round = asyncio.Event()

    async def _write_round(self) -> None:
        said = self._share_of_events()
        kept, self._kept = self._writable(self._kept, self._held)
        # A run's events are all written before its end: it said them before it ended.
        waiting = self._held.union(self._events) if self._events or self._held else self._held
        returned, self._returned = self._writable(self._returned, waiting)
        ended, self._ended = self._writable(self._ended, waiting)
        if said:
            await self._persist(said, self._append)
        if kept:
            await self._persist(kept, self._keep)
        if returned:
            await self._persist(returned, self._give_back)
        if ended:
            await self._persist(ended, self._finish)
        if self._has_more():
            self._work.set()

    def _has_more(self) -> bool:
        """Whether there is something that can be written now."""
        queued = (self._ended, self._returned, self._kept)
        if not self._held:
            return bool(self._events) or any(queued)
        return not self._held.issuperset(self._events) or any(
            each.run not in self._held for queue in queued for each in queue
        )

    def _share_of_events(self) -> list[tuple[Run[Any], Event]]:
        """Take the next batch of events: as many of each run as the batch has room for, a few at a time."""
        said: list[tuple[Run[Any], Event]] = []
        weight = 0
        turns = deque(run for run in self._events if run not in self._held)
        while turns and len(said) < BATCH and weight < BATCH_WEIGHT:
            run = turns.popleft()
            unwritten = self._events.pop(run)
            for _ in range(min(len(unwritten), SHARE)):
                event = unwritten.popleft()
                weight += event.weight
                said.append((run, event))
            if unwritten:
                self._events[run] = unwritten
                turns.append(run)
        return said

    def _writable(self, queue: list[AnyWrite], waiting: "set[Run[Any]]") -> tuple[list[AnyWrite], list[AnyWrite]]:
        """Part what may be written in this round from what waits: for its run, or for room."""
        if not waiting:
            return queue[:BATCH], queue[BATCH:]
        now: list[AnyWrite] = []
        later: list[AnyWrite] = []
        for each in queue:
            (now if len(now) < BATCH and each.run not in waiting else later).append(each)
        return now, later

    def _hold(self, runs: Sequence[Run[Any]]) -> None:
        """Leave what these have to write for a moment: their rows are locked."""
        if runs:
            assert self._loop is not None
            self._held.update(runs)
            self._loop.call_later(HELD_FOR, self._release, runs)

    def _release(self, runs: Sequence[Run[Any]]) -> None:
        self._held.difference_update(runs)
        self._work.set()

    async def _persist(self, batch: Sequence[Any], write: Callable[..., Coroutine[Any, Any, None]]) -> None:
        """Write a batch, for as long as it takes."""
        again = False
        while True:
            try:
                async with self._lane.connection() as connection:
                    await write(connection, batch, again)
                # A checkpoint is nothing that anybody follows.
                if self._relay.has_followers and write != self._keep:
                    self._relay.notify(EMITTED if write == self._append else CHANGED, [item[0].id for item in batch])
            except Exception as error:  # noqa: BLE001 — whatever is wrong with one of them, the others are written
                if not worth_repeating(error):
                    await self._isolate(batch, write, error)
                    return
                again = True
                await asyncio.sleep(RETRY)
            else:
                return

    async def _isolate(
        self, batch: Sequence[Any], write: Callable[..., Coroutine[Any, Any, None]], error: Exception
    ) -> None:
        """PostgreSQL refuses something in this batch: find out what, and lose nothing else over it."""
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._persist(batch[:middle], write)
            await self._persist(batch[middle:], write)
            return
        (item,) = batch
        run: Run[Any] = item[0]
        log.error("run.write_refused", run=run.id, action=run.action, what=write.__name__.strip("_"), error=error)
        text = f"{REFUSED} {describe(error)}"
        if isinstance(item, Kept):
            if not item.done.done():
                item.done.set_exception(error)
        elif may_fail(item):
            await self._persist([Ended(run, "failed", None, storable(text))], self._finish)
        elif isinstance(item, Ended | Returned):
            # Its deadline is what is left to end it.
            self._settled([run])
        else:
            self._written(run, [item[1]])

    # -- the statements -----------------------------------------------------------------------------------------------

    async def _append(self, connection: Connection, batch: Sequence[tuple[Run[Any], Event]], again: bool) -> None:
        said: dict[Run[Any], list[Event]] = {}
        for run, event in batch:
            said.setdefault(run, []).append(event)
        given = [Event(*event[:4], run.events) for run, event in batch]
        stale = await stream.append(connection, self._database.namespace, given)
        left = [run for run in said if (run.id, run.token) in stale]
        counts = await self._still_ours(connection, left) if left else {}
        held = []
        for run in left:
            if counts.get(run.id) == run.events:
                held.append(run)
                self._events.setdefault(run, deque()).extendleft(reversed(said.pop(run)))
            elif not again or counts.get(run.id) != run.events + len(said[run]):
                self.refuse(run, "event")
        self._hold(held)
        for run, written in said.items():
            run.events += len(written)
            self._written(run, written)

    def _written(self, run: Run[Any], written: Sequence[Event]) -> None:
        run.said -= len(written)
        run.said_weight -= sum(event.weight for event in written)

    async def _keep(self, connection: Connection, batch: Sequence[Kept], _again: bool) -> None:
        # The last one of a run counts: a statement may touch a row only once.
        latest = {(each.run.id, each.run.token): each.state for each in batch}
        values = {
            "ids": [run_id for run_id, _ in latest],
            "tokens": [token for _, token in latest],
            "states": list(latest.values()),
        }
        written = set(await (await connection.execute(self._sql(CHECKPOINT), values)).fetchall())
        left = [each.run for each in batch if (each.run.id, each.run.token) not in written]
        ours = await self._still_ours(connection, left) if left else {}
        held = [each for each in batch if each.run.id in ours]
        self._kept[:0] = held
        self._hold([each.run for each in held])
        for each in batch:
            if each.run.id in ours:
                continue
            stale = (each.run.id, each.run.token) not in written
            if stale:
                self.refuse(each.run, "checkpoint")
            if each.done.done():
                continue
            if stale:
                each.done.set_exception(fenced(each.run))
            else:
                each.done.set_result(None)

    async def _give_back(self, connection: Connection, batch: Sequence[Returned], again: bool) -> None:
        values = {
            "ids": [each.run.id for each in batch],
            "tokens": [each.run.token for each in batch],
            "pauses": [each.paused for each in batch],
            "delays": [each.delay for each in batch],
            "errors": [each.error for each in batch],
        }
        rows = await (await connection.execute(self._sql(GIVE_BACK), values)).fetchall()
        cancelled: set[int] = set()
        if len(rows) < len(batch):
            written = {row[0] for row in rows}
            cancelled = await self._end_cancelled(connection, [each for each in batch if each.run.id not in written])
            batch, held = await self._sort_out(connection, batch, written | cancelled, returned=again)
            self._returned[:0] = held
        self.outcomes.update(
            "cancelled" if each.run.id in cancelled else "paused" if each.paused else "retried" for each in batch
        )
        self._settled([each.run for each in batch])

    async def _end_cancelled(self, connection: Connection, batch: Sequence[Returned]) -> set[int]:
        """End those whose cancellation was requested, instead of giving them back; return which they were."""
        values = {
            "ids": [each.run.id for each in batch],
            "tokens": [each.run.token for each in batch],
            "states": ["cancelled"] * len(batch),
            "results": [None] * len(batch),
            "errors": ["cancelled on request" + (f"; {each.error}" if each.error else "") for each in batch],
        }
        return {row[0] for row in await (await connection.execute(self._sql(END_CANCELLED), values)).fetchall()}

    async def _finish(self, connection: Connection, batch: Sequence[Ended], _again: bool) -> None:
        runs = [each.run for each in batch]
        values: dict[str, Any] = {
            "ids": array([run.id for run in runs]),
            "tokens": array([run.token for run in runs]),
            "states": None,
            "results": None,
            "errors": None,
        }
        plain = True
        for each in batch:
            if each.state is not None or each.result is not None:
                plain = False
                break
        if not plain:
            values["states"] = [each.state for each in batch]
            values["results"] = [each.result for each in batch]
            values["errors"] = [each.error for each in batch]
        try:
            cursor = await connection.execute(self._sql(FINISH), values)
        except psycopg.errors.LockNotAvailable:
            cursor = await connection.execute(self._sql(FINISH_UNLOCKED), values)
        if cursor.rowcount < len(batch):
            batch, held = await self._sort_out(connection, batch, set(), returned=False)
            self._ended[:0] = held
            runs = [each.run for each in batch]
        if plain:
            self.outcomes["succeeded"] += len(batch)
        else:
            self.outcomes.update(each.state or "succeeded" for each in batch)
        self._settled(runs)

    async def _sort_out(
        self, connection: Connection, batch: Sequence[AnyEnd], written: set[int], *, returned: bool
    ) -> tuple[list[AnyEnd], list[AnyEnd]]:
        """Return those that are written, and those whose rows are locked. The others were taken over.

        Some were not written by this statement: they are locked, were taken over, or we ended them in an earlier one
        whose answer was lost.
        """
        missing = {each.run.id: each for each in batch if each.run.id not in written}
        values = {"ids": list(missing), "tokens": [each.run.token for each in missing.values()], "returned": returned}
        # In this order: what is not ended yet when it is asked for may be, when the second statement looks.
        ours = await self._still_ours(connection, [each.run for each in missing.values()])
        rows = await (await connection.execute(self._sql(CONFIRM), values)).fetchall()
        done = written | {row[0] for row in rows}
        held = [each for each in missing.values() if each.run.id in ours and each.run.id not in done]
        self._hold([each.run for each in held])
        refused = [each.run for each in missing.values() if each.run.id not in done and each.run.id not in ours]
        for run in refused:
            self.refuse(run, "completion", stop=False)
        self._settled(refused)
        return [each for each in batch if each.run.id in done], held

    async def _still_ours(self, connection: Connection, runs: Sequence[Run[Any]]) -> dict[int, int]:
        """Return how many events each of these has that still runs with its token."""
        values = {"ids": [run.id for run in runs], "tokens": [run.token for run in runs]}
        return dict(await (await connection.execute(self._sql(STILL_OURS), values)).fetchall())

    def refuse(self, run: Run[Any], what: str, *, stop: bool = True) -> None:
        """Count a write that came too late; its run is somebody else's."""
        self.fenced[what] += 1
        log.warning("run.fenced", run=run.id, action=run.action, token=run.token, what=what)
        if stop:
            self._on_fenced(run)


def fenced(run: Run[Any]) -> Fenced:
    return Fenced(
        f"run {run.id} was taken over: the token {run.token} of this attempt is out of date, and nothing that it "
        f"writes counts"
    )


def may_fail(item: Any) -> bool:
    """Whether its run can be recorded as failed instead; not if that is what was refused."""
    if isinstance(item, Returned):
        return not item.paused
    return isinstance(item, Ended) and not (item.error or "").startswith(REFUSED)


def worth_repeating(error: BaseException) -> bool:
    if isinstance(error, DBAPIError) and error.orig is not None:
        error = error.orig
    if isinstance(error, psycopg.Error) and error.sqlstate in TRANSIENT:
        return True
    if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith(TOO_MUCH):
        return False
    return isinstance(error, DatabaseAway | psycopg.OperationalError | psycopg.InterfaceError) or shows_an_outage(error)


def storable(text: str) -> str:
    """Return the text without secrets, and as PostgreSQL takes it: without NUL and lone surrogates, bounded."""
    clean = redact(text).replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= ERROR_MOST else clean[:ERROR_MOST] + " …"
