"""Plain functions as actions: each attempt runs in a thread of its own.

The thread does not come from a pool, so a function that never returns blocks no other attempt. A thread cannot be
cancelled: the next call of `run.blocking` raises the cancellation. Until then the attempt goes on.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from app.fleet.engine.execute.failures import reason_of

Answer = TypeVar("Answer")


async def run_in_thread(function: Callable[[Any], Any], argument: Any, name: str) -> Any:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            value, error = context.run(function, argument), None
        except BaseException as raised:  # noqa: BLE001 — the caller of `run_in_thread` handles it
            value, error = None, raised
        with suppress(RuntimeError):  # the loop is closed, and the process is about to end
            loop.call_soon_threadsafe(deliver, done, value, error)

    threading.Thread(target=work, name=name, daemon=True).start()
    while True:
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if done.done():
                raise


def deliver(done: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(value)
        return
    try:
        done.set_exception(error)
    except BaseException:  # noqa: BLE001 — a future refuses a StopIteration
        done.set_exception(RuntimeError(reason_of(error)))


def wait_from_thread(work: Coroutine[Any, Any, Answer], loop: asyncio.AbstractEventLoop) -> Answer:
    """Block a thread until the event loop has done some work for it."""
    if asyncio._get_running_loop() is not None:  # noqa: SLF001 — the public one raises where there is none
        work.close()
        raise RuntimeError("`run.blocking` is for plain functions; an async action awaits the run's own methods")
    return asyncio.run_coroutine_threadsafe(work, loop).result()
