"""Background services: how each one starts and stops, and how its loop survives errors.

Every service has the same contract (`Service`). `start` and `stop` may be called in any order and any number of times;
they do the obvious thing and never raise because of the order. When `stop` returns, no task, thread or session of the
service is left. A stopped service cannot be started again: create a new one.

A service that works in a loop is a `LoopService`. It writes the loop itself, with its own waits, and runs each step
under a `LoopErrors`:

    self._wake = asyncio.Event()
    self._errors = LoopErrors(log, failed="reconciler.failed", defect="engine.defect", service="reconciler")

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            async with self._errors.logged():
                await self._reconcile()
            await wait_for_event(self._wake, jittered(INTERVAL))
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, final

import psycopg

from app.fleet.errors import DatabaseError
from app.fleet.telemetry.logs import EventLog

Result = TypeVar("Result")

CANCEL_INTERVAL = 0.25
DEFECT_PAUSE = 1.0


class Service:
    """Something that runs in the background between `start` and `stop`.

    Subclasses write `_start` and `_stop`; each is called at most once. `_stop` is called even if `_start` failed
    half-way, so it must accept that some of its resources were never created.
    """

    name = "service"

    def __init__(self) -> None:
        self._started = False
        self._stopped = False
        self._lock = asyncio.Lock()

    @property
    def running(self) -> bool:
        return self._started and not self._stopped

    @final
    async def start(self) -> None:
        async with self._lock:
            if self._started or self._stopped:
                return
            self._started = True
            await self._start()

    @final
    async def stop(self) -> None:
        async with self._lock:
            if not self._started or self._stopped:
                self._stopped = True
                return
            self._stopped = True
            await self._stop()

    async def _start(self) -> None:
        """Acquire the resources and start the tasks."""

    async def _stop(self) -> None:
        """End the tasks and release the resources."""


class LoopService(Service):
    """A service whose work is one task, which runs from its start until its stop."""

    _task: "asyncio.Task[None] | None" = None

    async def _run(self) -> None:
        raise NotImplementedError

    async def _start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.name)

    async def _stop(self) -> None:
        await cancel_and_wait(self._task)


class LoopErrors:
    """Keeps a background loop alive: an error in one of its steps is logged, and the loop goes on after a pause.

    error in a step                   log event                             pause
    psycopg.Error or DatabaseError    `failed`, at debug, or at warning     `retry_interval`
                                      if `warn_when(failures)` is true
    any other Exception               `defect`, at error, with traceback    `defect_pause`
    a cancellation, SystemExit, …     none: the error ends the loop

    `failures` counts the database failures since the last step without an error. So `lambda failures: failures == 1`
    logs one warning per outage, and `lambda failures: failures % 5 == 0` logs every fifth failure in a row. Without
    `failed`, a database failure is a defect too. `fields` are added to the event `failed`.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        service: str,
        defect: str,
        failed: str | None = None,
        warn_when: Callable[[int], bool] = lambda _: False,
        retry_interval: float = 0.0,
        defect_pause: float = DEFECT_PAUSE,
        **fields: Any,
    ) -> None:
        self.failures = 0
        self._log = log
        self._service = service
        self._defect = defect
        self._failed = failed
        self._warn_when = warn_when
        self._retry_interval = retry_interval
        self._defect_pause = defect_pause
        self._fields = fields

    @asynccontextmanager
    async def logged(self) -> AsyncIterator[None]:
        """Run one step: its errors are logged and do not leave the block, which then ends after the pause."""
        pause = 0.0
        try:
            yield
            self.failures = 0
        except Exception as error:  # noqa: BLE001 — a defect must not end the loop for good
            if self._failed is not None and isinstance(error, (psycopg.Error, DatabaseError)):
                self.failures += 1
                log_event = self._log.warning if self._warn_when(self.failures) else self._log.debug
                log_event(self._failed, **self._fields, reason=" ".join(str(error).split()))
                pause = self._retry_interval
            else:
                self._log.error(self._defect, error=error, service=self._service)
                pause = self._defect_pause
        if pause > 0:
            await asyncio.sleep(pause)


class BackgroundTasks:
    """Tasks that continue although no caller awaits them. They are kept here: asyncio has only weak references."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish_or_undo(
        self, work: Coroutine[Any, Any, Result | None], undo: Callable[[Result], object]
    ) -> Result | None:
        """Wait for work that continues when the caller is cancelled. Its result, if any, is then passed to `undo`."""
        task = self.start(work)

        def abandoned(_: object) -> None:
            if not task.cancelled() and task.exception() is None and (result := task.result()) is not None:
                undo(result)

        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(abandoned)
            raise

    async def stop(self) -> None:
        for task in list(self._tasks):
            await cancel_and_wait(task)


def jittered(seconds: float) -> float:
    """Return these seconds, up to a quarter more or less: instances that started together do not stay in step."""
    return seconds * random.uniform(0.75, 1.25)


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until the event is set, at most for these seconds.

    This does not use `asyncio.wait_for`. On Python 3.11 that function returns normally, and the cancellation is lost,
    if the task is cancelled at the moment at which the event is set. The cancelled loop would then run for ever.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def cancel_and_wait(task: "asyncio.Task[Any] | None") -> None:
    """Cancel a task of the caller, if there is one, and wait until it has ended.

    The task is cancelled again every `CANCEL_INTERVAL` until it has ended: on Python 3.11, `asyncio.wait_for` can lose
    a cancellation (see `wait_for_event`), and psycopg's pool uses it to wait for a connection.
    """
    if task is None:
        return
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_INTERVAL)
    if not task.cancelled():
        # Reading the exception stops asyncio from logging that it was never retrieved.
        task.exception()


def detach(task: "asyncio.Task[Any]") -> None:
    """Let the process end although this task never ends: the event loop then does not wait for it."""
    asyncio._unregister_task(task)  # noqa: SLF001 — documented, under this name
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 — the caller has logged it
