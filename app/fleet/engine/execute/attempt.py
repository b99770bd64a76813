"""An attempt: one execution of a run by this instance, under the fencing token of its claim.

`Run` is the handle that the action gets (`engine/actions/run.py`). `Attempt` is the engine's record of the same
attempt: what the claim returned, what is not written yet, and how the attempt ends. It gives the handle its writes, and
the run writer makes them.
"""

import asyncio
import enum
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast

from opentelemetry.trace import Span, Tracer
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.engine.actions.action import Action
from app.fleet.runs.claim import Row
from app.fleet.runs.effects.events import Event
from app.fleet.telemetry import tracing
from app.fleet.telemetry.logs import current_run

if TYPE_CHECKING:
    from app.fleet.engine.execute.writer import RunWriter

Answer = TypeVar("Answer")


class Ending(enum.StrEnum):
    """Why the engine ends an attempt before its action returns."""

    # Another attempt has the run.
    FENCED = "fenced"
    # The executor pauses: the run goes back to pending.
    PAUSED = "paused"
    # A request to cancel the run has come.
    CANCELLED = "cancelled"
    # The deadline has passed.
    TIMEOUT = "timeout"


class Attempt:
    # Defaults of the class: an attempt that has nothing of these, as nearly all, costs no time for them.
    #
    # `run.commit` has begun its transaction; it has committed.
    committing = False
    committed = False
    # How many events are not written yet, and their size in characters.
    unwritten_events = 0
    unwritten_size = 0
    # The run writer has the end of this attempt, or needs none. Whatever the attempt writes after that is refused.
    recorded = False
    ending: Ending | None = None
    deadline = 0.0
    # When it began, and how long it took, on the event loop's clock.
    began = 0.0
    seconds = 0.0
    # The traceback of its failure, until it is stored.
    traceback: str | None = None
    # How long the attempt has blocked the event loop (`loop_monitor.py`).
    blocked_seconds = 0.0
    task: asyncio.Task[None] | None = None
    # Its span, if a tracer is configured, and when the action has ended, in nanoseconds since 1970.
    span: Span | None = None
    ended_ns = 0

    def __init__(self, action: Action[Any], writer: "RunWriter", row: Row) -> None:
        """`row` has the columns of a claim (`runs/claim.py`)."""
        self.action = action
        self.limited = action.limited
        self._writer = writer
        # `events` counts the events of the run in the database, its changes of state among them.
        (
            self.run_id, self.action_id, self.token, self.number, self.deaths, self.max_attempts, self.priority,
            self.trigger, self.scheduled_for, self.payload_text, self.checkpoint_text, self.events, self.ordering_key,
            self.request_id, self.trace_parent,
        ) = row  # fmt: skip
        # The attempts that count against the retries of the run: not the attempts that ended with their instance.
        self.counted_attempts = self.number - self.deaths

    def begin_span(self, tracer: Tracer) -> None:
        """Begin the span of this attempt in the present task."""
        with tracing.contained("process"):
            self.span = tracing.begin_attempt(
                tracer, self.action.name, self.run_id, self.number, self.deaths, self.trace_parent
            )

    def end_span(self, span: Span, error: BaseException | None) -> None:
        self.ended_ns = time.time_ns()
        with tracing.contained("process"):
            tracing.end_attempt(span, error)

    @property
    def stopping(self) -> asyncio.Event:
        return self._writer.stopping

    async def checkpoint(self, text: str) -> None:
        await self._writer.checkpoint(self, text)

    def stop_if_pausing(self) -> None:
        """Stop the attempt here if the executor pauses: its run continues elsewhere, from the checkpoint."""
        if self.stopping.is_set():
            self.ending = self.ending or Ending.PAUSED
            raise asyncio.CancelledError("the instance drains")

    async def emit(self, kind: str, text: str | None) -> None:
        await self._writer.emit(self, kind, text)

    @asynccontextmanager
    async def commit(self, result: Callable[[], str | None]) -> AsyncIterator[AsyncSession]:
        """Commit what the block does and the completion of the run; `result` is called after the block."""
        self.committing = True
        try:
            async with self._writer.transactions.commit(self, result) as session:
                yield session
            self.committed = True
        finally:
            self.committing = self.committed

    async def guard(self, session: AsyncSession) -> None:
        await self._writer.transactions.guard(self, session)

    def forget(self, events: Sequence[Event]) -> None:
        """These events do not wait to be written any more."""
        self.unwritten_events -= len(events)
        self.unwritten_size -= sum(event.weight for event in events)

    def refuse(self, write: str) -> None:
        """Count and log a write that came too late, without ending the attempt."""
        self._writer.refuse(self, write, stop=False)

    def wait_from_thread(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return self._writer.wait_from_thread(work)


# The attempt that this code belongs to. The executor sets it in the task of each attempt; outside of attempts it is
# None. Log lines take the ids of the run and of its request from it.
current_attempt = cast("ContextVar[Attempt | None]", current_run)
