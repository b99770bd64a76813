"""The executor: claims runs and runs them, as many at once as `FLOTILLA_CONCURRENCY` says.

An attempt is a task, or a thread for a plain function. However it ends, its end goes to the writer, and its slot is
free when the writer has it durably. The executor itself never waits for an action.

    an attempt                        is recorded as
    returns                           succeeded, with what it returned
    raises                            pending again after a wait, or failed if it has no retries left
    raises GiveUp, or returns what    failed
      is no JSON
    exceeds its deadline              as if it had raised; cancelled first
    is cancelled on request           cancelled
    is still there `STUBBORN` after   the same, saying that it ignored its cancellation; whatever it still does, it
      it was cancelled                does with an old token
    writes and is refused, or loses   nothing: another attempt has the run by now
      its instance's identity
    is cut short by a shutdown        pending again, without having used up an attempt

Nothing that an action raises, returns or emits leaves its own attempt: not `SystemExit`, and not an exception whose
own methods raise when its text is read. Whatever happens while an end is recorded, the slot comes back. An action that
blocks the event loop is found by a thread that watches it (`loop_monitor.py`).

Stopping: no new claims from the flag on; at `stop`, actions are told (`run.stopping`) and may finish or take a
checkpoint until `HURRY` before the limit; what is left then is cancelled and given back.
"""

import asyncio
import contextvars
import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psycopg

from app.fleet.background import Service, cancel_and_wait, detach, wait_for_event
from app.fleet.cluster.member import Member
from app.fleet.cluster.registry import Identity
from app.fleet.db.pool import Database
from app.fleet.duration import MAX_DURATION, parse_duration
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.dispatch.claim import MANY, Claimant, Clock
from app.fleet.engine.execute.containment import contain_tasks
from app.fleet.engine.execute.failures import FailureLog
from app.fleet.engine.execute.loop_monitor import LoopMonitor
from app.fleet.engine.execute.run import Run, as_json, current_run
from app.fleet.engine.execute.writer import RunWriter
from app.fleet.errors import DatabaseError, GiveUp, NotJson, PayloadInvalid, TryAgain
from app.fleet.lifecycle import Lifecycle
from app.fleet.runs.claim import ACTION, WIDTH
from app.fleet.settings import FleetSettings
from app.fleet.stream.relay import CHANGED, Relay
from app.fleet.telemetry.logs import events, request_id
from app.fleet.telemetry.redaction import describe

BATCH = 500
# The first claim after a pause takes few, so that a handful of runs is shared; each one that finds more takes more.
FIRST = 4
GROWTH = 4
# A claim looks at so many places, and at more the more it wants: most are empty, if others look too.
PLACES = 512
TICK = 0.1
RETRY = 0.1
AFTER_DEFECT = 1.0
STUBBORN = 5.0
HURRY = 3.0
RESULT_MOST = 1_048_576
UNREADABLE = "(its text cannot be read)"

log = events(__name__)


class Executor(Service):
    name = "executor"

    def __init__(
        self,
        settings: FleetSettings,
        database: Database,
        member: Member,
        catalogue: Catalogue,
        lifecycle: Lifecycle,
        relay: Relay,
    ) -> None:
        super().__init__()
        self.writer = RunWriter(database, relay, self._on_settled, self._on_fenced)
        self._relay = relay
        self.claimant = Claimant(database.namespace, catalogue, Clock())
        self.abandoned = 0
        self.claimed = 0
        # Claims take turns. Of one that has ended, every run that it took is known here, or its answer is lost.
        self.claims_begun = self.claims_ended = 0
        self._concurrency = settings.concurrency
        self._pause_timeout = settings.pause_timeout
        self._hurry = min(HURRY, settings.pause_timeout / 2)
        self._database = database
        self._member = member
        self._catalogue = catalogue
        self._lifecycle = lifecycle
        self._lane = database.dedicated()
        self._running: dict[int, Run[Any]] = {}
        # What we own, from the claim until its end is durable: a slot each.
        self._owned: set[tuple[int, int]] = set()
        self._batch_size = FIRST
        self._claiming_paused = False
        self._wake = asyncio.Event()
        self._failures = FailureLog()
        self._watch = LoopMonitor(lambda: list(self._running.values()))
        self._claims: asyncio.Task[None] | None = None
        self._ticks: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def running_runs(self) -> dict[int, Run[Any]]:
        """The attempts under way here, by the id of their run."""
        return self._running

    @property
    def room(self) -> int:
        return self._concurrency - len(self._owned)

    def now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    def knows(self, run_id: int, token: int) -> bool:
        return (run_id, token) in self._owned

    def wake(self) -> None:
        self._wake.set()

    def pause_claiming(self, wanted: bool) -> None:
        """Leave new runs to other instances for a moment: this one has many slots to make runs of first."""
        self._claiming_paused = wanted
        self._wake.set()

    # -- told by others -----------------------------------------------------------------------------------------------

    def cancel(self, run_id: int) -> None:
        """Cancel an attempt that is under way here, on request."""
        if run := self._running.get(run_id):
            self._end(run, "cancelled")

    def superseded(self, run: Run[Any]) -> None:
        """Stop an attempt whose run is no longer ours."""
        self._end(run, "fenced")

    async def drop(self, _lost: Identity) -> None:
        """Stop everything that runs under an identity that was lost; its runs are pending elsewhere already."""
        dropped = list(self._running.values())
        for run in dropped:
            self._end(run, "fenced")
        tasks = [run.task for run in dropped if run.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=STUBBORN)

    # -- the service --------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        contain_tasks(self._loop)
        self.writer.start()
        self._watch.start(self._loop)
        self._claims = asyncio.create_task(self._claim_for_ever(), name="executor-claims")
        self._ticks = asyncio.create_task(self._tick_for_ever(), name="executor-ticks")

    async def _stop(self) -> None:
        await cancel_and_wait(self._claims)
        await self._pause()
        await cancel_and_wait(self._ticks)
        self._watch.stop()
        await self.writer.stop()
        await self._lane.close()

    async def _pause(self) -> None:
        """Let attempts finish or take a checkpoint, then give back what is left."""
        self.writer.stopping.set()
        await self._until_ended(self._pause_timeout - self._hurry)
        for run in list(self._running.values()):
            self._end(run, "paused")
        await self._until_ended(self._hurry / 3)
        for run in list(self._running.values()):
            self._abandon(run)
        try:
            async with asyncio.timeout(self._hurry / 2):
                await self.writer.empty()
        except TimeoutError:
            # The death of this instance's row gives back what could not be written.
            log.warning("executor.unwritten", runs=len(self._owned))

    async def _until_ended(self, seconds: float) -> None:
        tasks = [run.task for run in self._running.values() if run.task is not None]
        if tasks and seconds > 0:
            await asyncio.wait(tasks, timeout=seconds)

    # -- claiming -----------------------------------------------------------------------------------------------------

    async def _claim_for_ever(self) -> None:
        assert self._loop is not None
        with suppress(psycopg.Error, DatabaseError):
            await self._prepare()
        while True:
            self._wake.clear()
            now = self._loop.time()
            due = self.claimant.backlog.due(now, 2 * self._batch_size + PLACES) if self._may_claim() else []
            if not due:
                await self._sleep_until(self.claimant.backlog.next_due(), now)
                continue
            try:
                await self._claim(due, now)
            except (psycopg.Error, DatabaseError) as error:
                # It may have been committed all the same: the reconciler finds runs of ours that we do not know.
                log.debug("executor.claim_failed", reason=" ".join(str(error).split()))
                await asyncio.sleep(RETRY)
            except Exception as error:  # noqa: BLE001 — a defect of ours must not end it for good
                log.error("engine.defect", error=error, service="executor")
                await asyncio.sleep(AFTER_DEFECT)

    def _may_claim(self) -> bool:
        return (
            self.room > 0
            and not self._claiming_paused
            and not self._lifecycle.draining.is_set()
            and self._member.holds()
        )

    async def _sleep_until(self, due: float | None, now: float) -> None:
        """Wait to be wait_for_event, or until something is due; while we may not claim, look again shortly."""
        if not self._may_claim():
            timeout: float | None = TICK if self.room > 0 and not self._claiming_paused else None
        else:
            timeout = None if due is None else max(0.0, due - now)
        await wait_for_event(self._wake, timeout)

    async def _prepare(self) -> None:
        if (identity := self._member.identity) is not None:
            async with self._lane.connection() as connection:
                await self.claimant.prepare(connection, identity)

    async def _claim(self, due: Sequence[Any], now: float) -> None:
        identity = self._member.identity
        if identity is None:
            return
        self.claims_begun += 1
        try:
            await self._claim_for(identity, due, now)
        finally:
            self.claims_ended += 1

    async def _claim_for(self, identity: Identity, due: Sequence[Any], now: float) -> None:
        # Where runs of many actions wait, they are shared out already.
        room = min(self.room, max(self._batch_size, len(due) if len(due) > MANY else 0))
        async with self._lane.connection() as connection:
            rows = await self.claimant.claim(connection, identity, due, room, now)
        if self._member.identity != identity:
            # Claimed for who we were: the death of that identity has them back already, or will.
            return
        self.claimed += len(rows)
        if self._relay.has_followers:
            self._relay.notify(CHANGED, (row[0] for row in rows))
        self._batch_size = min(self._batch_size * GROWTH, BATCH) if len(rows) >= room else FIRST
        for row in rows:
            self._begin(row)
        if 0 < len(rows) < room:
            # They begin before more is claimed. In a flood it is the other way round: the next claim is under way while
            # they run.
            await asyncio.sleep(0)

    def _begin(self, row: tuple[Any, ...]) -> None:
        assert self._loop is not None
        action = self._catalogue.of_id(row[ACTION])
        assert action is not None
        run: Run[Any] = Run(action, self.writer, row[:WIDTH])
        self._owned.add((run.id, run.token))
        if row[WIDTH]:
            self.writer.cancelled(run, "cancelled on request, while it waited")
            return
        if former := self._running.get(run.id):
            # The run was taken from us and claimed by us again: the former attempt must end, whoever noticed first.
            self._end(former, "fenced")
            self._abandon(former)
        self._running[run.id] = run
        run.deadline = self.now() + action.timeout
        # Made directly, and not by the loop's factory: nothing that it runs raises what would leave the loop.
        run.task = asyncio.Task(self._attempt(run, action), loop=self._loop)

    # -- one attempt --------------------------------------------------------------------------------------------------

    async def _attempt(self, run: Run[Any], action: Action[Any]) -> None:
        # On every line that it logs.
        request_id.set(f"run/{run.id}")
        current_run.set(run)
        try:
            if not action.plain:
                run.payload  # noqa: B018 — it is checked before the action sees anything
            value = await (self._in_thread(run, action) if action.blocking else action.handler(run))
            result = None if value is None or run.committed else as_json(value, "what it returned", RESULT_MOST)
        except BaseException as error:  # noqa: BLE001 — nothing an action raises gets further than its own run
            if self._leave(run):
                self._ended_badly(run, action, error)
        else:
            if self._leave(run):
                self._ended_well(run, action, result)
        # The task's context holds the run: a circle, which only the garbage collector would find.
        run.task = None

    def _leave(self, run: Run[Any]) -> bool:
        """Take an attempt off the list; false if it was written off before it ended."""
        if self._running.get(run.id) is not run:
            return False
        del self._running[run.id]
        return True

    def _ended_well(self, run: Run[Any], action: Action[Any], result: str | None) -> None:
        if run.committed:
            self.writer.outcomes["succeeded"] += 1
            self._settle(run)
        elif run.ending == "fenced":
            self.writer.refuse(run, "completion", stop=False)
            self._settle(run)
        elif run.ending == "timeout" or (run.ending is None and self.now() > run.deadline):
            # Too late is too late, also for one that kept the loop from noticing.
            self._retry_or_fail(run, exceeded(action, run))
        else:
            self.writer.succeeded(run, result)

    def _ended_badly(self, run: Run[Any], action: Action[Any], error: BaseException) -> None:
        try:
            self._record_failure(run, action, error)
        except BaseException:  # noqa: BLE001 — methods of the exception were called, and may do anything
            if not run.recorded:
                self._retry_or_fail(run, f"{type(error).__name__}: {UNREADABLE}")

    def _record_failure(self, run: Run[Any], action: Action[Any], error: BaseException) -> None:
        if run.committed:
            # The effects and the completion are there; what was raised after them changes neither.
            self.writer.outcomes["succeeded"] += 1
            self._settle(run)
            log.warning("run.failed_after_commit", run=run.id, action=run.action, reason=told(error))
        elif run.ending == "fenced":
            self._settle(run)
        elif run.ending == "paused":
            self.writer.paused(run)
        elif run.ending == "cancelled":
            self.writer.cancelled(run, "cancelled on request")
        elif run.ending == "timeout":
            self._retry_or_fail(run, exceeded(action, run))
        elif isinstance(error, GiveUp):
            self.writer.failed(run, f"gave up: {text_of(error)}")
        elif isinstance(error, PayloadInvalid | NotJson):
            self.writer.failed(run, text_of(error))
        elif isinstance(error, TryAgain):
            self._retry_or_fail(run, text_of(error), wait_of(error))
        else:
            # A `Fenced` as well, whoever raised it. If this attempt has lost its run, its token is refused.
            reason = told(error)
            self._retry_or_fail(run, reason)
            self._failures.write(run, error, reason, self.now())

    def _settle(self, run: Run[Any]) -> None:
        """Give the slot back at once: there is nothing to write, or it is not ours to write."""
        run.recorded = True
        self._on_settled([run])

    def _retry_or_fail(self, run: Run[Any], text: str, after: float | None = None) -> None:
        """Without `after`, a retry waits as the action says."""
        if run.tries < run.max_attempts:
            self.writer.retry(run, after, text)
        else:
            self.writer.failed(run, text)

    async def _in_thread(self, run: Run[Any], action: Action[Any]) -> Any:
        """Run a plain function in a thread of its own: one that never ends takes nobody else's place."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            try:
                value, error = context.run(action.handler, run), None
            except BaseException as raised:  # noqa: BLE001 — handed on to the attempt
                value, error = None, raised
            with suppress(RuntimeError):  # the loop has ended meanwhile, and its process is about to
                loop.call_soon_threadsafe(deliver, done, value, error)

        threading.Thread(target=work, name=f"run-{run.id}", daemon=True).start()
        while True:
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                # A thread cannot be cancelled. Its next use of the handle is; until then, its run is under way.
                if done.done():
                    raise

    # -- ending from outside ------------------------------------------------------------------------------------------

    def _end(self, run: Run[Any], why: str) -> None:
        """Cancel an attempt, saying why; the first reason stands, unless the run is not ours any more."""
        if run.ending is not None and why != "fenced":
            return
        run.ending = why
        assert self._loop is not None
        run.deadline = self._loop.time() + STUBBORN
        if run.task is not None:
            run.task.cancel()

    def _abandon(self, run: Run[Any]) -> None:
        """Write an attempt off that does not end: record its end without it, and give its slot to another."""
        if not self._leave(run):
            return
        self.abandoned += 1
        log.error("run.abandoned", run=run.id, action=run.action, why=run.ending or "timeout")
        if run.task is not None:
            detach(run.task)
        action = self._catalogue[run.action]
        if run.ending == "fenced":
            self._settle(run)
        elif run.ending == "paused":
            self.writer.paused(run)
        elif run.ending == "cancelled":
            self.writer.cancelled(run, "cancelled on request; it ignored its cancellation")
        else:
            self._retry_or_fail(run, exceeded(action, run) + "; it ignored its cancellation")

    async def _tick_for_ever(self) -> None:
        """Look after deadlines, and after attempts that do not end although they were cancelled."""
        assert self._loop is not None
        while True:
            await asyncio.sleep(TICK)
            now = self._loop.time()
            self._watch.tick()
            for run in [run for run in self._running.values() if run.deadline < now]:
                try:
                    if run.ending is None:
                        self._end(run, "timeout")
                    else:
                        self._abandon(run)
                except Exception as error:  # noqa: BLE001 — a defect of ours must not end it for good
                    log.error("engine.defect", error=error, service="executor")

    # -- told by the writer -------------------------------------------------------------------------------------------

    def _on_settled(self, runs: Sequence[Run[Any]]) -> None:
        self._owned.difference_update([(run.id, run.token) for run in runs])
        assert self._loop is not None
        for action_id in {run.action_id for run in runs if run.limited or run.action_id in self.claimant.limited}:
            self.claimant.backlog.look_at_action(action_id, self._loop.time())
        for run in runs:
            if run.ordering_key is not None:
                self.claimant.backlog.tell_ended(run.action_id, run.ordering_key)
        self._wake.set()

    def _on_fenced(self, run: Run[Any]) -> None:
        if self._running.get(run.id) is run:
            self._end(run, "fenced")


def deliver(done: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(value)
        return
    try:
        done.set_exception(error)
    except BaseException:  # noqa: BLE001 — a future refuses a StopIteration
        done.set_exception(RuntimeError(told(error)))


def told(error: BaseException) -> str:
    """Return an exception's class and text as one line, whatever its own methods do."""
    try:
        text = describe(error)
    except BaseException:  # noqa: BLE001 — see above
        text = f"{type(error).__name__}: {UNREADABLE}"
    if issubclass(type(error), asyncio.CancelledError):
        return text.replace(type(error).__name__, "it was cancelled from inside", 1)
    return text


def text_of(error: BaseException) -> str:
    """Return the text of an exception, without its class."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 — the exception is the action's; its `__str__` may do anything
        return UNREADABLE


def wait_of(error: TryAgain) -> float | None:
    """Return how many seconds to wait; None, for the usual wait, if the exception does not say.

    The constructor has checked it, but a subclass need not call that, and anyone may set the attribute.
    """
    try:
        given = error.after
        wait = None if given is None else parse_duration(given)
    except BaseException:  # noqa: BLE001 — the exception is the action's; its properties may do anything
        return None
    return None if wait is None or math.isnan(wait) else min(max(0.0, wait), MAX_DURATION)


def exceeded(action: Action[Any], run: Run[Any]) -> str:
    text = f"exceeded its deadline of {action.timeout:g} s"
    if run.blocked:
        text += f"; it blocked the event loop for {run.blocked:.0f} s"
    return text
