"""The executor: runs up to `FLOTILLA_CONCURRENCY` attempts at the same time, and records how each ends.

An attempt is a task, or a thread for a plain function. Each attempt has a slot, from the claim until its end is
durable. The executor itself never waits for an action.

    the attempt                           is recorded as
    returns                               succeeded, with the returned value
    raises                                pending again after a delay; failed if it has no retries left
    raises GiveUp, or returns a value     failed
      that is no JSON
    exceeds its deadline                  as if it had raised; its task is cancelled first
    is cancelled on request               cancelled
    ignores its cancellation for          the same, and the error says so. Its slot is free, and what it still writes is
      `STUBBORN` seconds                  refused
    writes after a takeover, or its       nothing: the run has another attempt, or will have one
      instance loses its identity
    is interrupted by a shutdown          pending again; this does not count as an attempt

An attempt that raises, or that raises after its deadline, also leaves its traceback (`failures.py`).

Whatever an action raises, returns or emits affects its own attempt alone: also `SystemExit`, and an exception whose
methods raise when its text is read. An error while an end is being recorded frees the slot too. A thread finds actions
that block the event loop (`loop_monitor.py`).

Stopping: the dispatcher has stopped claiming. `run.stopping` is set; actions may finish or make a checkpoint until
`HURRY` seconds before the limit. What still runs then is cancelled and becomes pending.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from app.fleet.background import LoopErrors, Service, cancel_and_wait, detach
from app.fleet.cluster.registry import Identity
from app.fleet.db.pool.pool import Database
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.run import MAX_RESULT, Run, as_json
from app.fleet.engine.execute import failures
from app.fleet.engine.execute.attempt import Attempt, Ending, current_attempt
from app.fleet.engine.execute.containment import contain_tasks
from app.fleet.engine.execute.loop_monitor import LoopMonitor
from app.fleet.engine.execute.threads import run_in_thread
from app.fleet.engine.execute.writer import RunWriter
from app.fleet.engine.figures.run_metrics import RunMetrics
from app.fleet.errors import GiveUp, NotJson, PayloadInvalid, TryAgain
from app.fleet.runs.claim import ACTION, WIDTH
from app.fleet.runs.effects.states import RunState
from app.fleet.settings import FleetSettings
from app.fleet.stream.relay import Relay
from app.fleet.telemetry import tracing
from app.fleet.telemetry.logs import event_log
from app.fleet.telemetry.metrics import LOOP_LAG

TICK = 0.1
STUBBORN = 5.0
HURRY = 3.0

log = event_log(__name__)


class Executor(Service):
    name = "executor"

    def __init__(
        self,
        settings: FleetSettings,
        database: Database,
        catalogue: Catalogue,
        relay: Relay,
        metrics: RunMetrics,
        on_settled: Callable[[Sequence[Attempt]], None],
        version: str,
    ) -> None:
        """`on_settled` gets attempts whose slots have become free."""
        super().__init__()
        self.writer = RunWriter(database, relay, metrics, self._settle, self._stop_fenced, version)
        self.abandoned = 0
        self._metrics = metrics
        self._on_settled = on_settled
        self._concurrency = settings.concurrency
        self._pause_timeout = settings.pause_timeout
        self._hurry = min(HURRY, settings.pause_timeout / 2)
        self._catalogue = catalogue
        self._running: dict[int, Attempt] = {}
        # A slot for each run that this instance has claimed, and whose end is not durable yet: its id and its token.
        self._slots: set[tuple[int, int]] = set()
        self._failures = failures.FailureLog()
        self._loop_monitor = LoopMonitor(lambda: list(self._running.values()))
        self._errors = LoopErrors(log, service="executor", defect="engine.defect", defect_pause=0.0)
        self._ticks: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tracer = tracing.tracer()

    @property
    def attempts(self) -> dict[int, Attempt]:
        """The attempts that run here, by the id of their run."""
        return self._running

    @property
    def room(self) -> int:
        """The number of free slots."""
        return self._concurrency - len(self._slots)

    def owns(self, run_id: int, token: int) -> bool:
        return (run_id, token) in self._slots

    def begin(self, row: tuple[Any, ...]) -> None:
        """Begin the attempt of a claimed run."""
        assert self._loop is not None
        action = self._catalogue.of_id(row[ACTION])
        assert action is not None
        attempt = Attempt(action, self.writer, row[:WIDTH])
        self._slots.add((attempt.run_id, attempt.token))
        if row[WIDTH]:
            self.writer.cancelled(attempt, "cancelled on request, while it waited")
            return
        if former := self._running.get(attempt.run_id):
            # Another instance took the run over, and this one has claimed it again: the former attempt is over.
            self._end(former, Ending.FENCED)
            self._abandon(former)
        self._running[attempt.run_id] = attempt
        attempt.began = self._loop.time()
        attempt.deadline = attempt.began + action.timeout
        # Made directly, and not by the task factory of the loop: nothing that `_execute` runs raises SystemExit.
        attempt.task = asyncio.Task(self._execute(attempt, action), loop=self._loop)

    def cancel(self, run_id: int) -> None:
        """Cancel the attempt at this run, if it runs here, on request."""
        if attempt := self._running.get(run_id):
            self._end(attempt, Ending.CANCELLED)

    def stop_fenced(self, attempt: Attempt) -> None:
        """End an attempt whose run another attempt has."""
        self._end(attempt, Ending.FENCED)

    async def drop(self, _lost: Identity) -> None:
        """End all attempts: the instance has lost its identity, and their runs are pending again."""
        dropped = list(self._running.values())
        for attempt in dropped:
            self._end(attempt, Ending.FENCED)
        tasks = [attempt.task for attempt in dropped if attempt.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=STUBBORN)

    # -- the service --------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        contain_tasks(self._loop)
        self.writer.start()
        self._loop_monitor.start(self._loop)
        self._ticks = asyncio.create_task(self._tick_for_ever(), name="executor-ticks")

    async def _stop(self) -> None:
        await self._pause()
        await cancel_and_wait(self._ticks)
        self._loop_monitor.stop()
        await self.writer.stop()

    async def _pause(self) -> None:
        """Let attempts finish or make a checkpoint, then make the runs of the others pending."""
        self.writer.stopping.set()
        await self._until_ended(self._pause_timeout - self._hurry)
        for attempt in list(self._running.values()):
            self._end(attempt, Ending.PAUSED)
        await self._until_ended(self._hurry / 3)
        for attempt in list(self._running.values()):
            self._abandon(attempt)
        try:
            async with asyncio.timeout(self._hurry / 2):
                await self.writer.empty()
        except TimeoutError:
            # When this instance is declared gone, the same transaction makes these runs pending.
            log.warning("executor.unwritten", runs=len(self._slots))

    async def _until_ended(self, seconds: float) -> None:
        tasks = [attempt.task for attempt in self._running.values() if attempt.task is not None]
        if tasks and seconds > 0:
            await asyncio.wait(tasks, timeout=seconds)

    async def _tick_for_ever(self) -> None:
        """Enforce deadlines, and abandon attempts that ignore their cancellation."""
        assert self._loop is not None
        while True:
            due = self._loop.time() + TICK
            await asyncio.sleep(TICK)
            now = self._loop.time()
            LOOP_LAG.observe(max(0.0, now - due))
            self._loop_monitor.tick()
            for attempt in [attempt for attempt in self._running.values() if attempt.deadline < now]:
                async with self._errors.logged():
                    if attempt.ending is None:
                        self._end(attempt, Ending.TIMEOUT)
                    else:
                        self._abandon(attempt)

    # -- one attempt --------------------------------------------------------------------------------------------------

    async def _execute(self, attempt: Attempt, action: Action[Any]) -> None:
        current_attempt.set(attempt)
        if self._tracer is not None:
            attempt.begin_span(self._tracer)
        run: Run[Any] = Run(attempt)
        try:
            if not action.plain:
                run.payload  # noqa: B018 — checked before the action sees anything
            if action.blocking:
                value = await run_in_thread(action.handler, run, f"run-{attempt.run_id}")
            else:
                value = await action.handler(run)
            result = None if value is None or attempt.committed else as_json(value, "what it returned", MAX_RESULT)
        except BaseException as error:  # noqa: BLE001 — whatever an action raises affects its own attempt alone
            if attempt.span is not None:
                attempt.end_span(attempt.span, error)
            if self._leave(attempt):
                self._record_error(attempt, action, error)
        else:
            if attempt.span is not None:
                attempt.end_span(attempt.span, None)
            if self._leave(attempt):
                self._record_return(attempt, result)
        # The context of the task refers to the attempt: without this, only the garbage collector would free both.
        attempt.task = None

    def _leave(self, attempt: Attempt) -> bool:
        """Remove an attempt from the running ones; return false if it was abandoned before it ended."""
        if self._running.get(attempt.run_id) is not attempt:
            return False
        del self._running[attempt.run_id]
        assert self._loop is not None
        attempt.seconds = self._loop.time() - attempt.began
        return True

    def _record_return(self, attempt: Attempt, result: str | None) -> None:
        assert self._loop is not None
        if attempt.committed:
            self._metrics.ended([attempt], RunState.SUCCEEDED)
            self._record_nothing(attempt)
        elif attempt.ending is Ending.FENCED:
            attempt.refuse("completion")
            self._record_nothing(attempt)
        elif attempt.ending is Ending.TIMEOUT or (attempt.ending is None and self._loop.time() > attempt.deadline):
            # An attempt that has blocked the event loop may return late before a tick has noticed.
            self._retry_or_fail(attempt, failures.exceeded(attempt))
        else:
            self.writer.succeeded(attempt, result)

    def _record_error(self, attempt: Attempt, action: Action[Any], error: BaseException) -> None:
        try:
            self._record(attempt, action, error)
        except BaseException:  # noqa: BLE001 — methods of the exception were called, and may do anything
            if not attempt.recorded:
                self._retry_or_fail(attempt, f"{type(error).__name__}: {failures.UNREADABLE}")

    def _record(self, attempt: Attempt, action: Action[Any], error: BaseException) -> None:
        if attempt.committed:
            # The effects and the completion are durable; an exception after them changes neither.
            self._metrics.ended([attempt], RunState.SUCCEEDED)
            self._record_nothing(attempt)
            log.warning(
                "run.failed_after_commit", run=attempt.run_id, action=action.name, reason=failures.reason_of(error)
            )
        elif attempt.ending is Ending.FENCED:
            self._record_nothing(attempt)
        elif attempt.ending is Ending.PAUSED:
            self.writer.paused(attempt)
        elif attempt.ending is Ending.CANCELLED:
            self.writer.cancelled(attempt, "cancelled on request")
        else:
            attempt.traceback = failures.stored_traceback(error)
            self._record_failure(attempt, error)

    def _record_failure(self, attempt: Attempt, error: BaseException) -> None:
        if attempt.ending is Ending.TIMEOUT:
            self._retry_or_fail(attempt, failures.exceeded(attempt), error)
        elif isinstance(error, GiveUp):
            self._fail(attempt, f"gave up: {failures.text_of(error)}", error)
        elif isinstance(error, PayloadInvalid | NotJson):
            self._fail(attempt, failures.text_of(error), error)
        elif isinstance(error, TryAgain):
            self._retry_or_fail(attempt, failures.text_of(error), error, failures.delay_of(error))
        else:
            # `Fenced` too, because any code can raise it. If the attempt really lost its run, this write is refused.
            self._retry_or_fail(attempt, failures.reason_of(error), error)

    def _retry_or_fail(
        self, attempt: Attempt, reason: str, error: BaseException | None = None, delay: float | None = None
    ) -> None:
        """Without `delay`, the delay of the action counts."""
        if attempt.counted_attempts >= attempt.max_attempts:
            self._fail(attempt, reason, error)
        else:
            self.writer.retry(attempt, delay, reason)
            self._failures.write(attempt, reason, error, failures.usual_delay(attempt) if delay is None else delay)

    def _fail(self, attempt: Attempt, reason: str, error: BaseException | None) -> None:
        self.writer.failed(attempt, reason)
        self._failures.write(attempt, reason, error, None)

    def _record_nothing(self, attempt: Attempt) -> None:
        """Free the slot at once: the end is durable already, or another attempt has the run."""
        attempt.recorded = True
        self._settle([attempt])

    # -- ending an attempt from outside -------------------------------------------------------------------------------

    def _end(self, attempt: Attempt, ending: Ending) -> None:
        """Cancel the task of an attempt. The first reason counts, but `FENCED` replaces any other."""
        if attempt.ending is not None and ending is not Ending.FENCED:
            return
        attempt.ending = ending
        assert self._loop is not None
        attempt.deadline = self._loop.time() + STUBBORN
        if attempt.task is not None:
            attempt.task.cancel()

    def _abandon(self, attempt: Attempt) -> None:
        """Give up an attempt that ignores its cancellation: record its end without it, and free its slot."""
        if not self._leave(attempt):
            return
        self.abandoned += 1
        ending = attempt.ending or Ending.TIMEOUT
        log.error("run.abandoned", run=attempt.run_id, action=attempt.action.name, why=ending.value)
        if attempt.task is not None:
            detach(attempt.task)
        if ending is Ending.FENCED:
            self._record_nothing(attempt)
        elif ending is Ending.PAUSED:
            self.writer.paused(attempt)
        elif ending is Ending.CANCELLED:
            self.writer.cancelled(attempt, "cancelled on request; it ignored its cancellation")
        else:
            self._retry_or_fail(attempt, failures.exceeded(attempt) + "; it ignored its cancellation")

    # -- called by the writer -----------------------------------------------------------------------------------------

    def _settle(self, attempts: Sequence[Attempt]) -> None:
        self._slots.difference_update([(attempt.run_id, attempt.token) for attempt in attempts])
        self._on_settled(attempts)

    def _stop_fenced(self, attempt: Attempt) -> None:
        if self._running.get(attempt.run_id) is attempt:
            self._end(attempt, Ending.FENCED)
