"""The handle of a run for a unit test: it records what an action does with it, without a database.

    run = Run.for_test(payload=Wanted(place="harbour"))
    await sound(run)
    assert run.checkpoints == [[4.2]]

Its checks are those of a real handle: what cannot be stored as JSON is refused. `run.commit` needs a session; without
one it raises an error that says so. `app.fleet.testing` has an instance with a database.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, TypeVar, cast

from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.engine.actions.run import P, Run
from app.fleet.errors import EngineError

Answer = TypeVar("Answer")


class RecordedAttempt:
    """What a handle needs of the engine (`run.Attempt`), in memory."""

    ending: None = None

    def __init__(
        self, *, number: int, max_attempts: int, ordering_key: str | None, trigger: str,
        scheduled_for: datetime | None, session: AsyncSession | None, name: str,
    ) -> None:  # fmt: skip
        self.run_id = self.token = 1
        self.priority = 0
        self.number = number
        self.max_attempts = max_attempts
        self.ordering_key = ordering_key
        self.trigger = trigger
        self.scheduled_for = scheduled_for
        self.payload_text: str | None = None
        self.checkpoint_text: str | None = None
        self.stopping = asyncio.Event()
        self.checkpoints: list[Any] = []
        self.events: list[tuple[str, Any]] = []
        self.committed = False
        self._session = session
        self._name = name

    @property
    def action(self) -> "RecordedAttempt":
        return self

    @property
    def name(self) -> str:
        return self._name

    def decode(self, _: str | None) -> Any:
        raise EngineError("this run has no payload: give it with Run.for_test(payload=…)")

    async def checkpoint(self, text: str) -> None:
        self.checkpoints.append(json.loads(text))

    def stop_if_pausing(self) -> None:
        if self.stopping.is_set():
            raise asyncio.CancelledError("the instance drains")

    async def emit(self, kind: str, text: str | None) -> None:
        self.events.append((kind, None if text is None else json.loads(text)))

    @asynccontextmanager
    async def commit(self, result: Callable[[], str | None]) -> AsyncIterator[AsyncSession]:
        yield self._own_session("run.commit()")
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

    def _own_session(self, what: str) -> AsyncSession:
        if self._session is None:
            raise EngineError(
                f"{what} needs a database: test this action with the fixture `instance` of app.fleet.testing, or give "
                f"a session with Run.for_test(session=…)"
            )
        return self._session


class RecordedRun(Run[P]):
    """A handle that records what an action does with it. `Run.for_test` makes one."""

    def __init__(self, attempt: RecordedAttempt, payload: P | None, last_checkpoint: Any) -> None:
        super().__init__(attempt)
        self._recorded = attempt
        self._payload = {} if payload is None else payload
        self._last_checkpoint = last_checkpoint

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


def recorded_run(payload: P | None, last_checkpoint: Any, **attempt: Any) -> RecordedRun[P]:
    return RecordedRun(RecordedAttempt(**attempt), payload, last_checkpoint)
