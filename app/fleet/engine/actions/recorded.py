"""The handle of a run for a unit test: it records what an action does with it, without a database.

    run = Run.for_test(payload=Wanted(place="harbour"))
    await sound(run)
    assert run.checkpoints == [[4.2]]

It checks values as a real handle does: a value that cannot be stored as JSON is refused. `run.commit` needs a session;
without one it raises an error that names the two ways to get one. `app.fleet.testing` has an instance with a database.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, TypedDict, TypeVar, Unpack, cast

from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.engine.actions.run import P, Run
from app.fleet.errors import EngineError

Answer = TypeVar("Answer")


class TestOptions(TypedDict, total=False):
    """The arguments of `Run.for_test`, beside the payload."""

    # The number of the attempt.
    attempt: int
    max_attempts: int
    last_checkpoint: Any
    ordering_key: str | None
    trigger: str
    scheduled_for: datetime | None
    # What `run.commit` gives its block.
    session: AsyncSession
    # The name of the action.
    action: str


class RecordedAttempt:
    """The attempt of a recorded run, in memory: the part of the engine that a handle needs (`run.Attempt`)."""

    ending: None = None
    payload_text: str | None = None

    def __init__(self, **options: Unpack[TestOptions]) -> None:
        self.run_id = self.token = 1
        self.priority = 0
        self.number = options.get("attempt", 1)
        self.max_attempts = options.get("max_attempts", 4)
        self.ordering_key = options.get("ordering_key")
        self.trigger = options.get("trigger", "code")
        self.scheduled_for = options.get("scheduled_for")
        before = options.get("last_checkpoint")
        self.checkpoint_text = None if before is None else json.dumps(before)
        self.stopping = asyncio.Event()
        self.checkpoints: list[Any] = []
        self.events: list[tuple[str, Any]] = []
        self.committed = False
        self._session = options.get("session")
        self.name = options.get("action", "test")

    @property
    def action(self) -> "RecordedAttempt":
        return self

    def decode(self, _: str | None) -> Any:
        """The handle has its payload already."""
        raise NotImplementedError

    async def checkpoint(self, text: str) -> None:
        self.checkpoints.append(json.loads(text))

    def stop_if_pausing(self) -> None:
        if self.stopping.is_set():
            raise asyncio.CancelledError("the instance drains")

    async def emit(self, kind: str, text: str | None) -> None:
        self.events.append((kind, None if text is None else json.loads(text)))

    @asynccontextmanager
    async def commit(self, result: Callable[[], str | None]) -> AsyncIterator[AsyncSession]:
        if self._session is None:
            raise EngineError(
                "run.commit() needs a database: test this action with the fixture `instance` of app.fleet.testing, or "
                "give a session with Run.for_test(session=…)"
            )
        yield self._session
        result()
        self.committed = True

    async def guard(self, session: AsyncSession) -> None:
        """The run is never taken over from this attempt."""

    def wait_from_thread(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Do the work here: nothing of this attempt waits."""
        try:
            work.send(None)
        except StopIteration as end:
            return cast("Answer", end.value)
        finally:
            work.close()
        raise EngineError(
            "run.blocking.commit() needs an event loop: test this action with the fixture `instance` of "
            "app.fleet.testing"
        )


class RecordedRun(Run[P]):
    """A handle that records what an action does with it. `Run.for_test` makes one."""

    def __init__(self, attempt: RecordedAttempt, payload: Any) -> None:
        super().__init__(attempt)
        self._recorded = attempt
        self._payload = {} if payload is None else payload

    @property
    def checkpoints(self) -> list[Any]:
        """The values of all checkpoints, in their order, as JSON returns them."""
        return self._recorded.checkpoints

    @property
    def events(self) -> list[tuple[str, Any]]:
        """The kinds and the data of all events; `progress` and `log` are events."""
        return self._recorded.events

    @property
    def committed(self) -> bool:
        """Whether a block of `run.commit` has ended without an error; `result` is what it stores."""
        return self._recorded.committed
