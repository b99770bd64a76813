"""The handle of a run: what its action is given, and what it may do.

Every write of a run carries the fencing token of the attempt that makes it, and requires that the run is running. When
the run is taken over (its instance was declared gone, or it exceeded its deadline), it is pending, and its next claim
increments the token. From the takeover on, PostgreSQL refuses every write of the old attempt, and the attempt gets
`Fenced`: from the write itself, or, because `emit` only queues, from the next call.

    await run.checkpoint(value)      durable when it returns; the next attempt reads it as `run.last_checkpoint`
    await run.emit(kind, data)       adds an event; events keep their order. `run.progress` and `run.log` are events
    async with run.commit() as s     one transaction for the effects and the completion of the run: all or nothing
    await run.guard(session)         the transaction of this session commits only if the attempt still owns the run

When the executor pauses (during a shutdown), `run.stopping` is set. A run may still finish, for a while. A run that
makes a checkpoint stops there; another instance continues from the checkpoint. This does not use up an attempt.

A plain function runs in a thread and calls the same methods through `run.blocking`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Unpack, cast, get_args, overload

import pydantic_core
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from typing_extensions import TypeVar

from app.fleet.db.stored_json import why_unreadable
from app.fleet.errors import EngineError, NotJson
from app.fleet.runs.effects.events import LOG, PROGRESS, RESERVED

if TYPE_CHECKING:
    from app.fleet.engine.actions.recorded import RecordedRun, TestOptions

# The type of a run's payload: by default any JSON object.
P = TypeVar("P", default=dict[str, Any])
Answer = TypeVar("Answer")
UNREAD: Any = object()
Level = Literal["debug", "info", "warning", "error"]
MAX_KIND = 100
# Characters of JSON. An event or a checkpoint is no place for files.
MAX_EVENT = 65_536
MAX_CHECKPOINT = 1_048_576
MAX_RESULT = 1_048_576


class PayloadReader(Protocol):
    """What the handle needs of its action."""

    @property
    def name(self) -> str: ...
    def decode(self, text: str | None) -> Any: ...


class Attempt(Protocol):
    """What the handle needs of the engine. `engine/execute/attempt.py` implements it."""

    run_id: int
    token: int
    number: int
    max_attempts: int
    priority: int
    ordering_key: str | None
    trigger: str
    scheduled_for: datetime | None
    payload_text: str | None
    checkpoint_text: str | None
    # Why the engine cancelled the attempt; None if it did not.
    ending: Any

    @property
    def action(self) -> PayloadReader: ...
    @property
    def stopping(self) -> asyncio.Event: ...
    async def checkpoint(self, text: str) -> None: ...
    def stop_if_pausing(self) -> None: ...
    async def emit(self, kind: str, text: str | None) -> None: ...
    def commit(self, result: Callable[[], str | None]) -> AbstractAsyncContextManager[AsyncSession]: ...
    async def guard(self, session: AsyncSession) -> None: ...
    def wait_from_thread(self, work: Coroutine[Any, Any, Answer]) -> Answer: ...


class Run(Generic[P]):
    """One attempt at a run, as its action sees it."""

    __slots__ = ("_attempt", "_last_checkpoint", "_payload", "result")

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._payload: Any = UNREAD
        self._last_checkpoint: Any = UNREAD
        # What `commit` stores as the result.
        self.result: Any = None

    @overload
    @classmethod
    def for_test(
        cls, payload: dict[str, Any] | None = None, **options: "Unpack[TestOptions]"
    ) -> "RecordedRun[dict[str, Any]]": ...

    @overload
    @classmethod
    def for_test(cls, payload: P, **options: "Unpack[TestOptions]") -> "RecordedRun[P]": ...

    @classmethod
    def for_test(cls, payload: Any = None, **options: "Unpack[TestOptions]") -> "RecordedRun[Any]":
        """Make a handle for a unit test, without a database: it records what the action does (`recorded.py`)."""
        from app.fleet.engine.actions.recorded import RecordedAttempt, RecordedRun

        return RecordedRun(RecordedAttempt(**options), payload)

    def __repr__(self) -> str:
        return f"<Run {self.id} of {self.action!r}, attempt {self.attempt}>"

    @property
    def id(self) -> int:
        """The id of the run: the same for every attempt."""
        return self._attempt.run_id

    @property
    def action(self) -> str:
        """The name of the action."""
        return self._attempt.action.name

    @property
    def payload(self) -> P:
        if self._payload is UNREAD:
            self._payload = self._attempt.action.decode(self._attempt.payload_text)
        return cast("P", self._payload)

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._attempt.number

    @property
    def max_attempts(self) -> int:
        return self._attempt.max_attempts

    @property
    def token(self) -> int:
        """The fencing token of this attempt. It only grows."""
        return self._attempt.token

    @property
    def priority(self) -> int:
        return self._attempt.priority

    @property
    def ordering_key(self) -> str | None:
        return self._attempt.ordering_key

    @property
    def trigger(self) -> str:
        """`schedule`, `api` (REST and command line) or `code`."""
        return self._attempt.trigger

    @property
    def scheduled_for(self) -> datetime | None:
        """The slot of a scheduled run; None for other runs."""
        return self._attempt.scheduled_for

    @property
    def last_checkpoint(self) -> Any:
        """The value of the last checkpoint, of this attempt or an earlier one; None if there was none."""
        if self._last_checkpoint is UNREAD:
            text = self._attempt.checkpoint_text
            self._last_checkpoint = None if text is None else json.loads(text)
        return self._last_checkpoint

    @property
    def stopping(self) -> asyncio.Event:
        """Set when the executor pauses, during a shutdown. A thread may read it with `is_set()`."""
        return self._attempt.stopping

    @property
    def blocking(self) -> "Blocking":
        """The same methods for a plain function, which runs in a thread."""
        return Blocking(self)

    async def checkpoint(self, value: Any) -> None:
        """Store a value durably. If the instance is draining, the attempt stops here and continues elsewhere."""
        text = as_json(value, "the checkpoint", MAX_CHECKPOINT)
        await self._attempt.checkpoint(text)
        # Before the attempt may stop: an action that handles its cancellation reads the checkpoint that is stored.
        self._last_checkpoint = json.loads(text)
        self._attempt.stop_if_pausing()

    async def emit(self, kind: str, data: Any = None) -> None:
        """Add an event to the run."""
        if not 0 < len(kind) <= MAX_KIND or not kind.isprintable():
            raise EngineError(f"the kind of an event is a printable word of at most {MAX_KIND} letters")
        if kind in RESERVED:
            raise EngineError(f"the event kinds {' and '.join(RESERVED)} are reserved: choose another word")
        await self._emit(kind, data)

    async def log(self, text: str, level: Level = "info") -> None:
        """Add a message for the clients that follow the run."""
        if level not in get_args(Level):
            raise EngineError(f"a level is one of {', '.join(get_args(Level))}, and not {level!r}")
        await self._emit(LOG, {"level": level, "text": text})

    async def progress(self, done: float, text: str | None = None) -> None:
        """Report how much of the run is done, from 0 to 1."""
        if not 0 <= done <= 1:
            raise EngineError(f"progress is a number from 0 to 1, and not {done!r}")
        await self._emit(PROGRESS, {"done": done, "text": text})

    async def _emit(self, kind: str, data: Any) -> None:
        await self._attempt.emit(kind, None if data is None else as_json(data, "the event", MAX_EVENT))

    @asynccontextmanager
    async def commit(self, result: Any = None) -> AsyncIterator[AsyncSession]:
        """Commit the effects and the completion of the run in one transaction.

        Give the result here, or set `run.result` inside the block.
        """
        self.result = result
        async with self._attempt.commit(self._result_text) as session:
            yield session

    def _result_text(self) -> str | None:
        return None if self.result is None else as_json(self.result, "the result", MAX_RESULT)

    async def guard(self, session: AsyncSession) -> None:
        """Let this transaction commit only while the attempt owns the run: no takeover happens before the commit."""
        await self._attempt.guard(session)


class Blocking:
    """The methods of the handle for a thread: each blocks the thread until the event loop has done the work."""

    def __init__(self, run: Run[Any]) -> None:
        self._run = run

    def checkpoint(self, value: Any) -> None:
        self._wait(self._run.checkpoint(value))

    def emit(self, kind: str, data: Any = None) -> None:
        self._wait(self._run.emit(kind, data))

    def progress(self, done: float, text: str | None = None) -> None:
        self._wait(self._run.progress(done, text))

    def log(self, text: str, level: Level = "info") -> None:
        self._wait(self._run.log(text, level))

    def commit(self, effects: Callable[[Session], Answer], result: Any = None) -> Answer:
        """Call `effects` with an SQLAlchemy session, and complete the run in the same transaction."""

        async def effects_and_completion() -> Answer:
            async with self._run.commit(result) as session:
                return await session.run_sync(effects)

        return self._wait(effects_and_completion())

    def _wait(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        attempt = self._run._attempt  # noqa: SLF001 — both classes are one handle, in two forms
        if attempt.ending is not None:
            work.close()
            raise asyncio.CancelledError(attempt.ending)
        return attempt.wait_from_thread(work)


def as_json(value: Any, what: str, max_length: int) -> str:
    """Return a value as JSON that PostgreSQL stores and every reader can read; raise `NotJson` with the reason."""
    try:
        text = pydantic_core.to_json(value, inf_nan_mode="strings").decode()
    except (ValueError, TypeError, RecursionError) as error:
        raise NotJson(f"{what} cannot be stored as JSON: {' '.join(str(error).split())}") from error
    if len(text) > max_length:
        raise NotJson(
            f"{what} has {len(text)} characters of JSON, and the limit is {max_length}: store it elsewhere, and a key "
            f"to it here"
        )
    if why := why_unreadable(text):
        raise NotJson(f"{what} cannot be stored as JSON: {why}")
    return text
