"""A run as its action sees it: what it was given, and what it may do.

Everything it writes carries the run's token. Once the run was taken back (its instance was declared gone, or it
exceeded its deadline), the run is `pending`, and then running with a higher token. Every write of the old attempt
raises `Fenced` from then on, and nothing of it is kept.

    await run.checkpoint(state)      durable when it returns; the next attempt finds it in `run.last_checkpoint`
    await run.emit(kind, data)       an event, in order; `run.progress` is one of them
    async with run.commit() as s     effects and the run's completion, in one transaction or not at all
    await run.guard(session)         this transaction commits only if the run is still ours

When a shutdown comes to the executor, `run.stopping` is set. A run may finish then, for a while; one that takes a
checkpoint stops there, and goes on from it elsewhere, without having used up an attempt.

A plain function runs in a thread, and does the same through `run.blocking`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, cast, get_args

import pydantic_core
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from typing_extensions import TypeVar

from app.fleet.db.stored_json import why_unreadable
from app.fleet.errors import EngineError, NotJson
from app.fleet.runs.events import LOG, PROGRESS, RESERVED

if TYPE_CHECKING:
    from app.fleet.engine.actions.action import Action
    from app.fleet.engine.execute.writer import RunWriter

# A plain `Run` is one with any JSON object.
P = TypeVar("P", default=dict[str, Any])
Answer = TypeVar("Answer")
UNREAD: Any = object()
Level = Literal["debug", "info", "warning", "error"]
KIND_MOST = 100
# What one event or checkpoint may have; a stream is no place for files.
EVENT_MOST = 65_536
STATE_MOST = 1_048_576


class Run(Generic[P]):
    """The handle of one attempt."""

    # fmt: off
    __slots__ = (
        "_action",
        "_checkpoint_text",
        "_last_checkpoint",
        "_payload",
        "_payload_text",
        "_writer",
        "action_id",
        "attempt",
        "blocked",
        "committed",
        "committing",
        "deadline",
        "ending",
        "events",
        "id",
        "limited",
        "max_attempts",
        "ordering_key",
        "priority",
        "recorded",
        "result",
        "said",
        "said_weight",
        "scheduled_for",
        "task",
        "token",
        "tries",
        "trigger",
    )
    # fmt: on

    def __init__(
        self,
        action: "Action[P]",
        writer: "RunWriter",
        row: tuple[int, int, int, int, int, int, int, str, datetime | None, str | None, str | None, int, str | None],
    ) -> None:
        """`row` is what a claim returns (`runs/claim.py`)."""
        self._action = action
        self._writer = writer
        (
            self.id, self.action_id, self.token, self.attempt, deaths, self.max_attempts, self.priority, self.trigger,
            self.scheduled_for, self._payload_text, self._checkpoint_text, self.events, self.ordering_key,
        ) = row  # fmt: skip
        # What counts against its retries: attempts that the death of an instance ended do not.
        self.tries = self.attempt - deaths
        self._payload: Any = UNREAD
        self._last_checkpoint: Any = UNREAD
        self.result: Any = None
        self.committing = self.committed = False
        # Events that are not written yet, and their size; `events` counts those that are, with the changes of state.
        self.said = self.said_weight = 0
        # Its end is with the writer, or needs no writing. What this attempt says after that is refused.
        self.recorded = False
        # Why its task was cancelled, if it was; set by the executor.
        self.ending: str | None = None
        self.deadline = 0.0
        # For how long it has kept the event loop from going round (`loop_monitor.py`).
        self.blocked = 0.0
        self.limited = action.limited
        self.task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Run {self.id} of {self.action!r}, attempt {self.attempt}>"

    @property
    def action(self) -> str:
        return self._action.name

    @property
    def payload(self) -> P:
        if self._payload is UNREAD:
            self._payload = self._action.decode(self._payload_text)
        return cast("P", self._payload)

    @property
    def last_checkpoint(self) -> Any:
        """What the last checkpoint kept, of this attempt or one before; None if there was none."""
        if self._last_checkpoint is UNREAD:
            self._last_checkpoint = None if self._checkpoint_text is None else json.loads(self._checkpoint_text)
        return self._last_checkpoint

    @property
    def stopping(self) -> asyncio.Event:
        """Set when the executor pauses, in a shutdown; a thread may look at it too, with `is_set()`."""
        return self._writer.stopping

    @property
    def blocking(self) -> "Blocking":
        """The same, for a plain function that runs in a thread."""
        return Blocking(self)

    async def checkpoint(self, state: Any) -> None:
        """Keep this, durably. If the instance drains, the run stops here and goes on from it elsewhere."""
        text = as_json(state, "the checkpoint", STATE_MOST)
        await self._writer.checkpoint(self, text)
        self._last_checkpoint = json.loads(text)
        if self.stopping.is_set():
            self.ending = self.ending or "paused"
            raise asyncio.CancelledError("the instance drains")

    async def emit(self, kind: str, data: Any = None) -> None:
        """Say that something happened."""
        if not 0 < len(kind) <= KIND_MOST or not kind.isprintable():
            raise EngineError(f"the kind of an event is a printable word of at most {KIND_MOST} letters")
        if kind in RESERVED:
            raise EngineError(f"the kinds {' and '.join(RESERVED)} have a meaning already: choose another word")
        await self._say(kind, data)

    async def log(self, text: str, level: Level = "info") -> None:
        """Say it to those who follow the run."""
        if level not in get_args(Level):
            raise EngineError(f"a level is one of {', '.join(get_args(Level))}, and not {level!r}")
        await self._say(LOG, {"level": level, "text": text})

    async def progress(self, done: float, text: str | None = None) -> None:
        """Say how far it is, from 0 to 1."""
        if not 0 <= done <= 1:
            raise EngineError(f"progress is from 0 to 1, and not {done!r}")
        await self._say(PROGRESS, {"done": done, "text": text})

    async def _say(self, kind: str, data: Any) -> None:
        await self._writer.emit(self, kind, None if data is None else as_json(data, "the event", EVENT_MOST))

    @asynccontextmanager
    async def commit(self, result: Any = None) -> AsyncIterator[AsyncSession]:
        """One transaction for the effects and the completion. Set `run.result` inside, or give it here."""
        self.result = result
        self.committing = True
        try:
            async with self._writer.committing(self) as session:
                yield session
                await self._writer.complete_in(session, self)
            self.committed = True
        finally:
            self.committing = self.committed

    async def guard(self, session: AsyncSession) -> None:
        """Let this transaction commit only while the run is ours: nobody can take it over before the commit."""
        await self._writer.guard(session, self)


# Whose attempt this code is part of, set in the task of each attempt; nobody's outside of runs.
current_run: ContextVar[Run[Any] | None] = ContextVar("flotilla_run", default=None)


class Blocking:
    """The handle's methods for a thread: each waits for the event loop to do it."""

    def __init__(self, run: Run[Any]) -> None:
        self._run = run

    def checkpoint(self, state: Any) -> None:
        self._wait(self._run.checkpoint(state))

    def emit(self, kind: str, data: Any = None) -> None:
        self._wait(self._run.emit(kind, data))

    def progress(self, done: float, text: str | None = None) -> None:
        self._wait(self._run.progress(done, text))

    def log(self, text: str, level: Level = "info") -> None:
        self._wait(self._run.log(text, level))

    def commit(self, effects: Callable[[Session], Answer], result: Any = None) -> Answer:
        """Have `effects` done and the run completed in one transaction; it is given an SQLAlchemy session."""

        async def whole() -> Answer:
            async with self._run.commit(result) as session:
                return await session.run_sync(effects)

        return self._wait(whole())

    def _wait(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        if self._run.ending is not None:
            work.close()
            raise asyncio.CancelledError(self._run.ending)
        return self._run._writer.wait_from_thread(work)  # noqa: SLF001 — one object in two shapes


def as_json(value: Any, what: str, most: int) -> str:
    """Write a value as JSON that PostgreSQL will take, or say why not."""
    try:
        text = pydantic_core.to_json(value, inf_nan_mode="strings").decode()
    except (ValueError, TypeError, RecursionError) as error:
        raise NotJson(f"{what} cannot be stored as JSON: {' '.join(str(error).split())}") from error
    if len(text) > most:
        raise NotJson(
            f"{what} is {len(text)} characters of JSON, and may have {most}: keep it elsewhere, and a key here"
        )
    if why := why_unreadable(text):
        raise NotJson(f"{what} cannot be stored as JSON: {why}")
    return text
