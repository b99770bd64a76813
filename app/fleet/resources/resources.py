"""The resources of one instance: opened at its start, found by type, closed at its end.

Opened after the migrations, in the order of their declaration, and before the engine claims or schedules anything: the
first run and the first request find all of them. Everything of the public API works while a resource is opened.
Closed in reverse order, in a step of the ordered shutdown: after the last request, and after the executor has paused,
while the pool is still open. So a resource can write what it has kept when it is closed; locks, limits and breakers are
stopped by then.

Each resource has a task of its own, which opens and closes it, because task groups, timeouts and cancel scopes must be
left by the task that has entered them.

    a resource                          effect
    raises while it is opened           `ResourceFailed`: the start is refused, those opened before are closed
    is not open after `OPEN_TIMEOUT`    the same; it is cancelled
    raises while it is in use           `resource.failed` in the log. The instance goes on, with the value as it is
    raises while it is closed           `resource.failed` in the log; the next one is closed
    is not closed in time               it is cancelled and left behind, and the next one is closed. Each has half of
                                        the time that is left of `CLOSE_TIMEOUT`: a resource that hangs leaves time for
                                        the others
    SIGKILL                             none is closed: the guarantee of nothing may depend on it

Not guaranteed: that no attempt uses a closed resource. An attempt that ignores its cancellation, or a thread, may.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, cast

from fastapi import Depends

from app.fleet.background import Service, detach
from app.fleet.errors import FleetError, ResourceFailed, ResourceUnknown
from app.fleet.resources.resource import Resource, check, listed, matching, name_of
from app.fleet.telemetry.logs import event_log

Value = TypeVar("Value")

OPEN_TIMEOUT = 30.0
# For all resources together. The limit of the step of the shutdown is a little longer.
CLOSE_TIMEOUT = 2.5
# How long a cancelled resource may take to end.
CANCEL_TIMEOUT = 0.2

log = event_log(__name__)


class Resources(Service):
    name = "resources"

    def __init__(self, settings: object, declared: Sequence[Resource[Any]]) -> None:
        super().__init__()
        check(declared, type(settings))
        self._declared = declared
        self._values: dict[Any, Any] = {type(settings): settings}
        self._held: list[HeldResource] = []

    def enter(self) -> None:
        """Make `provided` mean this instance, in this task and in the tasks and threads that it starts."""
        current.set(self)

    def find(self, kind: Any) -> Any:
        """Return the value of this type, or of the only subclass of it."""
        found = matching(kind, self._values)
        if len(found) == 1:
            return self._values[found[0]]
        if found:
            raise ResourceUnknown(
                f"several resources are a {name_of(kind)} ({', '.join(map(name_of, found))}): ask for one of them"
            )
        raise ResourceUnknown(
            f"no resource of the type {name_of(kind)} is open: declare one with @resource in app/startup.py; "
            f"{listed(self._values)}"
        )

    async def _start(self) -> None:
        for each in self._declared:
            held = HeldResource(each, {name: self.find(kind) for name, kind in each.needs.items()})
            self._held.append(held)
            self._values[each.kind] = await held.open()

    async def _stop(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_TIMEOUT
        while self._held:
            held = self._held.pop()
            self._values.pop(held.declared.kind, None)
            await held.close(max(0.0, (deadline - loop.time()) / 2))


class HeldResource:
    """One resource, and the task that opens it, holds it and closes it."""

    def __init__(self, declared: Resource[Any], needs: Mapping[str, Any]) -> None:
        self.declared = declared
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(needs), name=f"resource-{declared.name}")

    async def _hold(self, needs: Mapping[str, Any]) -> BaseException | None:
        """Open the resource, wait, and close it; return the error of any of this."""
        try:
            async with asynccontextmanager(self.declared.function)(**needs) as value:
                self._opened.set_result(value)
                await self._closing.wait()
        except BaseException as error:  # noqa: BLE001 — a SystemExit would end the event loop, with everything in it
            return error
        return None

    async def open(self) -> Any:
        await asyncio.wait({self._task, self._opened}, timeout=OPEN_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        if self._opened.done():
            self._task.add_done_callback(self._ended)
            return self._opened.result()
        if self._task.done():
            error = self._task.result()
            self._failed("opening", error)
            raise ResourceFailed(
                f"the resource {self.declared.location} could not be opened: {type(error).__name__}: {error}"
            ) from error
        await self._abandon()
        raise ResourceFailed(f"the resource {self.declared.location} was not open after {OPEN_TIMEOUT:g} s")

    async def close(self, seconds: float) -> None:
        if self._task.done():
            return
        self._closing.set()
        await asyncio.wait({self._task}, timeout=seconds)
        if not self._task.done():
            await self._abandon()
            self._failed("closing", TimeoutError(f"it was not closed after {seconds:.2g} s"))
        elif error := self._task.result():
            self._failed("closing", error)

    async def _abandon(self) -> None:
        """Cancel the task. One that ignores this is left behind."""
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=CANCEL_TIMEOUT)
        if not self._task.done():
            detach(self._task)

    def _ended(self, task: "asyncio.Task[BaseException | None]") -> None:
        # At the end of the event loop, asyncio cancels whatever is left.
        if not self._closing.is_set() and not isinstance(task.result(), asyncio.CancelledError):
            self._failed("use", task.result())

    def _failed(self, during: str, error: BaseException | None) -> None:
        log.error("resource.failed", resource=self.declared.location, during=during, error=error)


# -- for the service's code -------------------------------------------------------------------------------------------

current: ContextVar[Resources] = ContextVar("flotilla_resources")


def provided(kind: type[Value]) -> Value:
    """Return the resource of this type, or the settings; for actions, and for whatever they call."""
    try:
        here = current.get()
    except LookupError:
        raise FleetError(
            "resources are only available in the code of a running service: in a route, an action or a singleton"
        ) from None
    return cast("Value", here.find(kind))


if TYPE_CHECKING:
    # For a type checker, a parameter with this annotation is simply of the type.
    Provided: TypeAlias = Annotated[Value, Depends()]
else:

    class Provided:
        """The annotation of a route's parameter that receives a resource: `client: Provided[httpx.AsyncClient]`."""

        def __class_getitem__(cls, kind: Any) -> Any:
            async def find() -> Any:
                # A coroutine: FastAPI calls other dependencies in a thread.
                return provided(kind)

            return Annotated[kind, Depends(find)]
