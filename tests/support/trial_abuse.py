"""Actions for `test_abuse`: one with a schedule that must not miss a slot, and some that misbehave."""

import asyncio
from collections.abc import Callable

from app.fleet import Run, TryAgain, action, transaction, trigger


@action("beat", every="1s", misfire="all", priority=10)
async def beat(_: Run) -> None: ...


@action("lone", overlap="skip")
async def lone(_: Run) -> None: ...


@action("hold-open")
async def hold_open(run: Run) -> None:
    """Keep a transaction open that has triggered a run of an action with overlap="skip"."""
    async with transaction() as opened:
        await trigger("lone", session=opened)
        await asyncio.sleep(run.payload["seconds"])


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")

    __repr__ = __str__


class Outside(BaseException):
    pass


RAISED: dict[str, Callable[[], BaseException]] = {
    "unprintable": Unprintable,
    "base": Outside,
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "cancelled": asyncio.CancelledError,
    "generator-exit": GeneratorExit,
    "stop": StopAsyncIteration,
    "group": lambda: BaseExceptionGroup("many", [Outside(), SystemExit(1), ValueError("x")]),
    "nul": lambda: ValueError("\x00 \ud800 \x1b[31m"),
    "long": lambda: ValueError("x" * 50_000_000),
    "far": lambda: TryAgain(after=3e11),
    "never": lambda: TryAgain(after=float("inf")),
    "not-a-number": lambda: TryAgain(after=float("nan")),
    "text": lambda: TryAgain(after="soon"),
}


@action("raise", retries=0)
async def raise_what(run: Run) -> None:
    error = RAISED[run.payload["what"]]()
    raise error
