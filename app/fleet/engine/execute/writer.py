"""The run writer: everything that the attempts of this instance write about their runs, in batches.

It is one task with a connection of its own. While it writes a batch, the next batch fills: a single write is sent at
once, a flood of writes in batches of `BATCH` (`unwritten.py`). A round writes in this order:

    events, checkpoints     before the end of the run that they belong to
    requeued runs           after a failure with retries left, or a pause: `pending` again
    ended runs              moved from `runs` to `finished_runs`

The tracebacks of failed attempts are stored just before the batch that requeues or ends their runs, by a statement of
its own: most batches have none.

A round takes an equal share of events from each run that has any. Runs that have more events keep waiting with their
end, and only they. So a run that emits without end delays no other: it fills its own `MAX_UNWRITTEN_EVENTS`, and then
waits in `emit`.

No statement waits for longer than 10 ms for a row that another transaction has locked. Writes for a locked row stay
here, and are sent again after `LOCKED_RETRY`. So a transaction that stays open delays the run whose row it holds, and
no other.

Every statement requires the attempt's token and the state `running`. After a takeover no row matches: the write is
refused and counted, and the attempt is ended. When a connection breaks during a statement, it is unknown whether
PostgreSQL executed it. So it is sent again, and `batches.py` distinguishes our own earlier write, a locked row and a
takeover.

    failure                                   effect
    the process dies before the statement     the run is taken over and attempted again
    the process dies after it                 none: the write is durable
    the database is unreachable               the batch waits, and with it the slots of its runs; it is sent again
                                              until the database answers
    the process dies after the statement      the traceback stays: it is true; the run is taken over and attempted
      that stores tracebacks                  again
    PostgreSQL refuses a value                the batch is halved until the value is found; that run fails, no other
    PostgreSQL refuses a traceback            the same, but the end of the attempt is written without it

A slot of the executor is free when the end of its run is durable. So an instance cannot claim faster than it writes.

Not guaranteed: an event that is not written yet is lost when the process dies.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from app.fleet.background import LoopErrors, cancel_and_wait
from app.fleet.db.pool.pool import Connection, Database
from app.fleet.engine.execute import batches
from app.fleet.engine.execute.attempt import Attempt, Ending
from app.fleet.engine.execute.batches import Checkpoint, Emitted, Ended, Returned, fenced, may_fail, worth_repeating
from app.fleet.engine.execute.failures import storable
from app.fleet.engine.execute.threads import wait_from_thread
from app.fleet.engine.execute.transactions import RunTransactions
from app.fleet.engine.execute.unwritten import Kind, Unwritten
from app.fleet.engine.figures.run_metrics import RunMetrics
from app.fleet.errors import EngineError
from app.fleet.runs.effects.events import Event
from app.fleet.runs.effects.states import RunState
from app.fleet.stream.relay import CHANGED, EMITTED, Relay
from app.fleet.telemetry.logs import event_log
from app.fleet.telemetry.redaction import describe

Answer = TypeVar("Answer")

# For metrics: which writes can be refused because of an old token.
WRITES = ("completion", "checkpoint", "event", "guard", "commit", "once")

RETRY = 0.1
# How long the writes for a locked row wait.
LOCKED_RETRY = 0.25
# How many events of one run, and characters of them, may wait before its `emit` waits.
MAX_UNWRITTEN_EVENTS = 500
MAX_UNWRITTEN_SIZE = 1_048_576
# How many events a run may have, its changes of state among them.
MAX_EVENTS = 100_000

log = event_log(__name__)


class RunWriter:
    """The executor and the attempts append to it; its own task writes."""

    def __init__(
        self,
        database: Database,
        relay: Relay,
        metrics: RunMetrics,
        on_settled: Callable[[Sequence[Attempt]], None],
        on_fenced: Callable[[Attempt], None],
        version: str,
    ) -> None:
        """`on_settled` gets attempts whose end is durable, `on_fenced` an attempt that goes on with an old token."""
        # Set when the executor pauses; actions see it as `run.stopping`.
        self.stopping = asyncio.Event()
        self.fenced: Counter[str] = Counter()
        self.transactions = RunTransactions(database, relay, self)
        self._relay = relay
        self._metrics = metrics
        self._namespace = database.namespace
        self._settled = on_settled
        self._on_fenced = on_fenced
        self._version = version
        self._connection = database.dedicated()
        self._unwritten = Unwritten()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        # Set at the end of the present round, and replaced.
        self._round_ended = asyncio.Event()
        self._errors = LoopErrors(log, service="writer", defect="engine.defect")
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- called by attempts and by the executor -----------------------------------------------------------------------

    def succeeded(self, attempt: Attempt, result: str | None) -> None:
        attempt.recorded = True
        self._unwritten.ended.append(Ended(attempt, None, result, None))
        self._work.set()

    def failed(self, attempt: Attempt, error: str) -> None:
        self._ended_with(attempt, RunState.FAILED, error)

    def cancelled(self, attempt: Attempt, error: str) -> None:
        self._ended_with(attempt, RunState.CANCELLED, error)

    def retry(self, attempt: Attempt, delay: float | None, error: str) -> None:
        """Make the run pending again after `delay` seconds; None means the delay of its action."""
        self._requeue(Returned(attempt, False, delay, storable(error)))

    def paused(self, attempt: Attempt) -> None:
        self._requeue(Returned(attempt, True, None, None))

    def _ended_with(self, attempt: Attempt, state: RunState, error: str) -> None:
        self._unwritten.ended.append(Ended(attempt, state, None, storable(error)))
        attempt.recorded = True
        self._work.set()

    def _requeue(self, returned: Returned) -> None:
        self._unwritten.returned.append(returned)
        returned.attempt.recorded = True
        self._work.set()

    async def checkpoint(self, attempt: Attempt, text: str) -> None:
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unwritten.checkpoints.append(Checkpoint(attempt, text, stored))
        self._work.set()
        await stored

    async def emit(self, attempt: Attempt, kind: str, data: str | None) -> None:
        while attempt.unwritten_events >= MAX_UNWRITTEN_EVENTS or attempt.unwritten_size >= MAX_UNWRITTEN_SIZE:
            await self._until_round_ends()
        if attempt.ending is Ending.FENCED or attempt.recorded:
            self.refuse(attempt, "event")
            raise fenced(attempt)
        if attempt.events + attempt.unwritten_events >= MAX_EVENTS:
            raise EngineError(
                f"run {attempt.run_id} has {MAX_EVENTS} events, which is the limit: emit less often, or write to a "
                f"table of your own"
            )
        event = Event(attempt.run_id, attempt.token, kind, data)
        attempt.unwritten_events += 1
        attempt.unwritten_size += event.weight
        self._unwritten.add_event(attempt, event)
        self._work.set()

    async def until_events_are_written(self, attempt: Attempt) -> None:
        while attempt.unwritten_events:
            await self._until_round_ends()

    def wait_from_thread(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Block a thread until the event loop has done some work for it."""
        assert self._loop is not None
        return wait_from_thread(work, self._loop)

    def refuse(self, attempt: Attempt, write: str, *, stop: bool = True) -> None:
        """Count a write that came too late: another attempt has the run."""
        self.fenced[write] += 1
        log.warning("run.fenced", run=attempt.run_id, action=attempt.action.name, token=attempt.token, what=write)
        if stop:
            self._on_fenced(attempt)

    # -- the task -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._write_for_ever(), name="writer")

    async def stop(self) -> None:
        await cancel_and_wait(self._task)
        await self._connection.close()

    async def empty(self) -> None:
        """Wait until everything that was appended so far is written."""
        while self._unwritten or not self._idle.is_set():
            self._work.set()
            await self._idle.wait()
            await asyncio.sleep(RETRY if self._unwritten.locked else 0)

    async def _until_round_ends(self) -> None:
        self._work.set()
        await self._round_ended.wait()

    async def _write_for_ever(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            self._idle.clear()
            try:
                async with self._errors.logged():
                    await self._write_round()
            finally:
                self._idle.set()
                self._round_ended.set()
                self._round_ended = asyncio.Event()

    async def _write_round(self) -> None:
        for kind, batch in self._unwritten.next_round():
            await self._persist(kind, batch)
        if self._unwritten.has_more():
            self._work.set()

    async def _persist(self, kind: Kind, batch: Sequence[Any]) -> None:
        """Write a batch, however long the database is unreachable."""
        sent_before = False
        while True:
            try:
                async with self._connection.connection() as connection:
                    await self._write(kind, connection, batch, sent_before)
                # Nobody follows checkpoints.
                if self._relay.has_followers and kind is not Kind.CHECKPOINTS:
                    what = EMITTED if kind is Kind.EVENTS else CHANGED
                    self._relay.notify(what, [each.attempt.run_id for each in batch])
            except Exception as error:  # noqa: BLE001 — if one write of the batch is wrong, the others are still written
                if not worth_repeating(error):
                    await self._isolate(kind, batch, error)
                    return
                sent_before = True
                await asyncio.sleep(RETRY)
            else:
                return

    async def _write(self, kind: Kind, connection: Connection, batch: Sequence[Any], sent_before: bool) -> None:
        if kind is Kind.EVENTS:
            await self._append_events(connection, batch, sent_before)
        elif kind is Kind.CHECKPOINTS:
            await self._store_checkpoints(connection, batch)
        elif kind is Kind.RETURNED:
            await self._requeue_runs(connection, batch, sent_before)
        else:
            await self._finish(connection, batch)

    async def _isolate(self, kind: Kind, batch: Sequence[Any], error: Exception) -> None:
        """Find the write that PostgreSQL refuses, by halves, and write the others."""
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._persist(kind, batch[:middle])
            await self._persist(kind, batch[middle:])
            return
        (refused,) = batch
        attempt: Attempt = refused.attempt
        log.error("run.write_refused", run=attempt.run_id, action=attempt.action.name, what=kind.value, error=error)
        if attempt.traceback is not None and isinstance(refused, Ended | Returned):
            # Perhaps it is the traceback that PostgreSQL refuses.
            attempt.traceback = None
            await self._persist(kind, batch)
        elif isinstance(refused, Checkpoint):
            if not refused.stored.done():
                refused.stored.set_exception(error)
        elif may_fail(refused):
            text = storable(f"{batches.REFUSED} {describe(error)}")
            await self._persist(Kind.ENDED, [Ended(attempt, RunState.FAILED, None, text)])
        elif isinstance(refused, Ended | Returned):
            # Nothing more can be written about this attempt. Another instance ends the run after its deadline.
            self._settled([attempt])
        else:
            attempt.forget([refused.event])

    def _wait_for_locked(self, attempts: Sequence[Attempt]) -> None:
        """Leave the writes of these attempts for `LOCKED_RETRY`: their rows are locked."""
        if attempts:
            assert self._loop is not None
            self._unwritten.lock(attempts)
            self._loop.call_later(LOCKED_RETRY, self._try_locked_again, attempts)

    def _try_locked_again(self, attempts: Sequence[Attempt]) -> None:
        self._unwritten.unlock(attempts)
        self._work.set()

    # -- a batch each -------------------------------------------------------------------------------------------------

    async def _append_events(self, connection: Connection, batch: Sequence[Emitted], sent_before: bool) -> None:
        outcome = await batches.append_events(connection, self._namespace, batch, sent_before=sent_before)
        for attempt in outcome.fenced:
            self.refuse(attempt, "event")
        for attempt, unwritten in outcome.locked.items():
            self._unwritten.put_events_back(attempt, unwritten)
        self._wait_for_locked(list(outcome.locked))
        for attempt, written in outcome.written.items():
            attempt.events += len(written)
            attempt.forget(written)

    async def _store_checkpoints(self, connection: Connection, batch: Sequence[Checkpoint]) -> None:
        outcome = await batches.store_checkpoints(connection, self._namespace, batch)
        self._unwritten.checkpoints[:0] = outcome.locked
        self._wait_for_locked([each.attempt for each in outcome.locked])
        for each in outcome.fenced:
            self.refuse(each.attempt, "checkpoint")
            if not each.stored.done():
                each.stored.set_exception(fenced(each.attempt))
        for each in outcome.written:
            if not each.stored.done():
                each.stored.set_result(None)

    async def _requeue_runs(self, connection: Connection, batch: Sequence[Returned], sent_before: bool) -> None:
        outcome = await batches.requeue(connection, self._namespace, batch, self._version, sent_before=sent_before)
        self._settle_others(outcome)
        self._unwritten.returned[:0] = outcome.locked
        for each in outcome.written:
            cancelled = each.attempt.run_id in outcome.cancelled
            ended_as = RunState.CANCELLED if cancelled else "paused" if each.paused else "retried"
            self._metrics.ended([each.attempt], ended_as)
        self._settled([each.attempt for each in outcome.written])

    async def _finish(self, connection: Connection, batch: Sequence[Ended]) -> None:
        plain = True
        for each in batch:
            if each.state is not None or each.result is not None:
                plain = False
                break
        outcome = await batches.finish(connection, self._namespace, batch, plain=plain)
        self._settle_others(outcome)
        self._unwritten.ended[:0] = outcome.locked
        attempts = [each.attempt for each in outcome.written]
        for state in (None,) if plain else {each.state for each in outcome.written}:
            own = attempts if plain else [each.attempt for each in outcome.written if each.state is state]
            self._metrics.ended(own, state or RunState.SUCCEEDED)
        self._settled(attempts)

    def _settle_others(self, outcome: batches.Outcome[Any]) -> None:
        """Handle what a statement could not write: locked rows wait, and what was taken over is over for us."""
        self._wait_for_locked([each.attempt for each in outcome.locked])
        for each in outcome.fenced:
            self.refuse(each.attempt, "completion", stop=False)
        if outcome.fenced:
            self._settled([each.attempt for each in outcome.fenced])
