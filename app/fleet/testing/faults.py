"""Faults: the points at which an attempt can die or lose its run, and how it is stopped there.

    point           is reached
    start           before the first line of the action
    checkpoint      before a checkpoint is stored
    checkpointed    after it, before the action continues
    event           before an event is added: `emit`, `progress`, `log`
    guard           before `run.guard` locks the run
    trigger         before a trigger in a transaction of its own
    transaction     before the commit of `transaction()`, or of the session of `once`
    commit          at the end of the block of `run.commit`, before the run is completed
    committed       after the commit, before the action continues
    return          after the action has returned
    (any other)     where the test calls `reach(name)`, such as in a fake of another system

The points of an attempt have numbers: `checkpoint 2` is before the second checkpoint of that attempt.

An attempt that dies does nothing more, as after SIGKILL: no line of its action is executed, not even `finally`, in none
of its tasks. So `Mortal` steps the coroutines of the action, and stops stepping them when the attempt is dead. A plain
function waits in its thread. At the end of the test, when its database sessions are closed, what is frozen is
cancelled, so that files and clients are closed. What the action does then has no effect on runs.

Not guaranteed: anything about code that the event loop calls directly (`call_soon`), and about a thread that an action
starts itself: both continue.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.engine.actions.run import Attempt

# How long the cancelled parts of a dead attempt may take at the end of the test.
RELEASE_TIMEOUT = 5.0


class Point(NamedTuple):
    """A point of an attempt: its name, and how often the attempt has reached that name by then."""

    name: str
    number: int = 1

    def __str__(self) -> str:
        return f"{self.name} {self.number}"


@dataclass(frozen=True)
class Fault:
    kind: Literal["death", "takeover"]
    point: Point

    def __str__(self) -> str:
        return f"{'dies' if self.kind == 'death' else 'is overtaken'} at {self.point}"


def dies_at(point: str, number: int = 1) -> Fault:
    """The instance dies when the attempt reaches this point; the run is rescued, and attempted again."""
    return Fault("death", Point(point, number))


def overtaken_at(point: str, number: int = 1) -> Fault:
    """Another attempt gets the run while this one is at this point. This one then continues, and gets `Fenced`."""
    return Fault("takeover", Point(point, number))


async def reach(name: str) -> None:
    """Mark a point of the attempt to which this code belongs. Outside of attempts of the kit it does nothing."""
    if watch := current_watch.get():
        await watch.reach(name)


class Watch:
    """Follows one attempt through its points, and stops it at the point of its fault."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault = fault
        self.points: list[Point] = []
        # Set when the point of the fault is reached.
        self.struck = asyncio.Event()
        # The transaction of `run.commit` is open.
        self.in_commit = False
        self._counts: Counter[str] = Counter()
        self._continue = asyncio.Event()
        self._dead = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def frozen(self) -> bool:
        return self._dead

    async def reach(self, name: str) -> None:
        self._counts[name] += 1
        point = Point(name, self._counts[name])
        self.points.append(point)
        if self.fault is None or self.fault.point != point or self.struck.is_set():
            return
        self._dead = self.fault.kind == "death"
        self.struck.set()
        # A dead attempt stays here: `Mortal` does not step it any more.
        await self._continue.wait()

    def resume(self) -> None:
        """Let an attempt that was overtaken continue."""
        self._continue.set()

    def never(self) -> "asyncio.Future[None]":
        """Return what a frozen task waits for."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        future = asyncio.get_running_loop().create_future()
        # What `await` sets: the task waits for this future.
        future._asyncio_future_blocking = True  # noqa: SLF001
        return future

    async def release(self) -> None:
        """Cancel what is frozen, at the end of the test."""
        self._dead = False
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=RELEASE_TIMEOUT)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                # Reading it stops asyncio from logging that it was never retrieved.
                task.exception()


current_watch: ContextVar[Watch | None] = ContextVar("flotilla_testing_watch", default=None)


class Mortal(Coroutine[Any, Any, Any]):
    """A coroutine that is not stepped any more when its attempt is dead."""

    def __init__(self, inner: Coroutine[Any, Any, Any], watch: Watch) -> None:
        self._inner = inner
        self._watch = watch

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._inner.throw, *error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[Any], Any] = self.send
        given: Any = None
        while True:
            try:
                waits_for = step(given)
            except StopIteration as end:
                return end.value
            try:
                step, given = self.send, (yield waits_for)
            except GeneratorExit:
                self.close()
                raise
            except BaseException as error:  # noqa: BLE001 — it is passed on to the coroutine
                step, given = self.throw, error

    def __getattr__(self, name: str) -> Any:
        # asyncio shows these attributes of a task: its name, its frame, its code.
        return getattr(self._inner, name)

    def _step(self, step: Callable[..., Any], *given: Any) -> Any:
        if self._watch.frozen:
            return self._watch.never()
        waits_for = step(*given)
        return self._watch.never() if self._watch.frozen else waits_for


def watch_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Make the tasks that an attempt starts mortal. A second call changes nothing."""
    former: Any = loop.get_task_factory()
    if getattr(former, "watches_tasks", False):
        return

    def make(of: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        watch = current_watch.get()
        if watch is not None and asyncio.iscoroutine(coroutine):
            coroutine = Mortal(coroutine, watch)
        return asyncio.Task(coroutine, loop=of, **options) if former is None else former(of, coroutine, **options)

    make.watches_tasks = True  # type: ignore[attr-defined]
    make.contains_tasks = getattr(former, "contains_tasks", False)  # type: ignore[attr-defined]
    loop.set_task_factory(make)


class WatchedAttempt:
    """An attempt whose writes are points. It is what the handle of the run needs (`engine/actions/run.py`)."""

    def __init__(self, inner: Attempt, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def checkpoint(self, text: str) -> None:
        await self._watch.reach("checkpoint")
        await self._inner.checkpoint(text)
        await self._watch.reach("checkpointed")

    async def emit(self, kind: str, text: str | None) -> None:
        await self._watch.reach("event")
        await self._inner.emit(kind, text)

    async def guard(self, session: AsyncSession) -> None:
        await self._watch.reach("guard")
        await self._inner.guard(session)

    @asynccontextmanager
    async def commit(self, result: Callable[[], str | None]) -> AsyncIterator[AsyncSession]:
        self._watch.in_commit = True
        try:
            async with self._inner.commit(result) as session:
                yield session
                await self._watch.reach("commit")
        finally:
            self._watch.in_commit = False
        await self._watch.reach("committed")
