"""Actions that fail in many ways, likely and unlikely ones. The key `how` of the payload chooses the way.

Whatever such an action raises, returns or emits must affect only its own attempt.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

from app.fleet import Fenced, GiveUp, Run, TryAgain, action


class Unreadable(Exception):
    """Its `__str__` raises an exception."""

    def __str__(self) -> NoReturn:
        raise ZeroDivisionError("no text")

    __repr__ = __str__


class UnreadableToAll(Unreadable):
    """Its `__str__` raises a `BaseException` that is not an `Exception`."""

    def __str__(self) -> NoReturn:
        raise KeyboardInterrupt

    __repr__ = __str__


class NeitherTrueNorFalse(Exception):
    def __bool__(self) -> NoReturn:
        raise ZeroDivisionError("no truth")


class GivesUpUnreadably(GiveUp):
    __str__ = Unreadable.__str__


class LaterUnreadably(TryAgain):
    """Its `after` raises an exception."""

    def __init__(self) -> None:
        Exception.__init__(self, "later")

    @property
    def after(self) -> float:  # type: ignore[override]
        raise SystemExit(9)


class Pretender(Exception):
    """Its `__class__` raises an exception."""

    @property  # type: ignore[misc]
    def __class__(self) -> NoReturn:  # type: ignore[override]
        raise ZeroDivisionError("no class")


class Endless:
    """An iterable, which would be stored as an array, whose iterator raises an exception."""

    def __iter__(self) -> Iterator[int]:
        raise ZeroDivisionError("no items")


def items() -> Iterator[int]:
    yield 1
    raise KeyboardInterrupt


def later(after: Any) -> TryAgain:
    """Return a `TryAgain` with a delay that its constructor would refuse."""
    error = TryAgain("later")
    error.after = after
    return error


def chained(depth: int) -> Exception:
    error = first = ValueError("the first")
    for number in range(depth):
        following = ValueError(f"number {number}")
        error.__cause__ = following
        error = following
    return first


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def in_a_circle() -> Exception:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


RAISED: dict[str, Callable[[], BaseException]] = {
    "no-text": Unreadable,
    "no-text-at-all": UnreadableToAll,
    "no-truth": NeitherTrueNorFalse,
    "no-class": Pretender,
    "gives-up-without-text": GivesUpUnreadably,
    "later-without-time": LaterUnreadably,
    "later-inf": lambda: later(float("inf")),
    "later-nan": lambda: later(float("nan")),
    "later-text": lambda: later("soon"),
    "later-list": lambda: later([]),
    "later-timedelta": lambda: later(timedelta.max),
    "later-int": lambda: later(10**400),
    "keyboard": KeyboardInterrupt,
    "exit": lambda: SystemExit(3),
    "generator-exit": GeneratorExit,
    "stop": lambda: StopIteration(1),
    "stop-async": StopAsyncIteration,
    "cancelled": asyncio.CancelledError,
    "group": lambda: ExceptionGroup("many", [ValueError("a"), ExceptionGroup("more", [TypeError("b")])]),
    "base-group": lambda: BaseExceptionGroup("many", [KeyboardInterrupt(), SystemExit(1)]),
    "nul": lambda: ValueError("a\x00b"),
    "surrogate": lambda: ValueError("a\ud800b"),
    "huge": lambda: ValueError("x" * 5_000_000),
    "memory": MemoryError,
    "recursion": RecursionError,
    "chain": lambda: chained(5000),
    "circle": in_a_circle,
    "fenced": lambda: Fenced("somebody else's"),
    "secret": lambda: caused(ValueError("password=hunter2"), KeyError("postgresql://u:hunter2@h")),
    "gives-up": lambda: GiveUp("there is no such parcel"),
    "gives-up-because": lambda: caused(GiveUp("there is no such parcel"), KeyError("parcel")),
}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


RETURNED: dict[str, Callable[[], Any]] = {
    "object": object,
    "no-items": Endless,
    "broken-items": items,
    "circular": circular,
    "deep": lambda: nested(100_000),
    "half-deep": lambda: nested(220),
    "long-integer": lambda: 10**5000,
    "hidden-long-integer": lambda: {"a": [{"b": -(10**5000)}]},
    "bytes": lambda: b"\xff",
    "lone-surrogate": lambda: "\ud800",
    "big": lambda: "x" * 2_000_000,
}
WAYS = [*RAISED, *(f"return-{way}" for way in RETURNED)]


def fault(how: str) -> Any:
    if how.startswith("return-"):
        return RETURNED[how.removeprefix("return-")]()
    error = RAISED[how]()
    raise error


@action("misbehave", retries=0)
async def misbehave(run: Run) -> Any:
    return fault(run.payload["how"])


@action("misbehave-in-thread", retries=0)
def misbehave_in_thread(run: Run) -> Any:
    return fault(run.payload["how"])


@action("misbehave-twice", retries=1, retry_delay="10ms")
async def misbehave_twice(run: Run) -> Any:
    return fault(run.payload["how"])


@action("babble", timeout="30s", retries=0)
async def babble(run: Run) -> None:
    """Emit events without end, as fast as possible; with `deaf`, ignore the cancellation."""
    while True:
        with contextlib.suppress(*[asyncio.CancelledError] if run.payload.get("deaf") else []):
            await run.emit("word", {"of": "x" * run.payload.get("letters", 100)})


@action("brief", timeout="20s", retries=0)
async def brief(run: Run) -> str:
    await asyncio.sleep(run.payload.get("seconds", 0.03))
    return "said"


@action("leave", retries=0)
async def leave(run: Run) -> str:
    """Start tasks; one of them tries to end the process, and one is cancelled before it begins."""

    async def end() -> None:
        await asyncio.sleep(0)
        raise {"exit": SystemExit(3), "keyboard": KeyboardInterrupt()}[run.payload["how"]]

    idle = asyncio.create_task(asyncio.sleep(3600))
    idle.cancel()
    if run.payload.get("group"):
        async with asyncio.TaskGroup() as group:
            group.create_task(end(), name="leaving")
    await asyncio.gather(asyncio.create_task(end()))
    return "left"


@action("fall", retries=1, retry_delay="10ms")
async def fall(run: Run) -> None:
    await asyncio.sleep(run.payload.get("seconds", 0))
    raise ValueError("it fell")


@action("meddle", retries=0)
async def meddle(_: Run) -> str:
    """Write through the handle of another attempt, which the test provides."""
    await strangers[0].checkpoint({"mine": False})
    return "meddled"


strangers: list[Run[Any]] = []
