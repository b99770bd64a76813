"""Tasks that an action starts: none of them can end the process.

asyncio keeps an exception of a task for the code that awaits the task, except SystemExit and KeyboardInterrupt. These
two leave the event loop, and the process ends with all other attempts and requests in it. In a task that was started
within an attempt, they become a `RuntimeError`. Tasks of the service itself are not changed.

Not guaranteed: anything about callbacks that an action gives to the event loop itself (`call_soon`).
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from app.fleet.engine.execute.attempt import current_attempt

Step = Callable[..., Any]


class Contained(Coroutine[Any, Any, Any]):
    """A coroutine whose steps raise neither SystemExit nor KeyboardInterrupt."""

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def send(self, value: Any) -> Any:
        return contained(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return contained(self._inner.throw, *error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        # asyncio shows these attributes of a task: its name, its frame, its code.
        return getattr(self._inner, name)


def contained(step: Step, *given: Any) -> Any:
    try:
        return step(*given)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__} was raised in a task that the action started") from error


def contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Contain each task of this loop that is started within an attempt. A second call changes nothing."""
    former: Any = loop.get_task_factory()
    if getattr(former, "contains_tasks", False):
        return

    def make(of: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        if current_attempt.get() is not None and asyncio.iscoroutine(coroutine):
            coroutine = Contained(coroutine)
        return asyncio.Task(coroutine, loop=of, **options) if former is None else former(of, coroutine, **options)

    make.contains_tasks = True  # type: ignore[attr-defined]
    loop.set_task_factory(make)
