"""The actions that the benchmarks trigger (`FLOTILLA_ACTIONS=benchmarks.actions`)."""

import asyncio
import random
import time
from contextlib import AsyncExitStack

from app.fleet import Run, action, lock
from benchmarks import marks


@action("noop")
async def noop(_: Run) -> None:
    """Do nothing."""


@action("mark")
async def mark(run: Run) -> None:
    """Record the start."""
    marks.leave(run)


@action("linger")
async def linger(run: Run) -> None:
    """Record the start, and continue until it is cancelled or its process is killed."""
    marks.leave(run)
    await asyncio.sleep(3600)


@action("linger-quietly")
async def linger_quietly(_: Run) -> None:
    """Continue until it is cancelled."""
    await asyncio.sleep(3600)


@action("talk")
async def talk(run: Run) -> None:
    """Emit events as fast as possible."""
    for number in range(run.payload["events"]):
        await run.emit("said", number)


@action("tick", timeout="1h")
async def tick(run: Run) -> None:
    """Emit the current time at random intervals, so that the runs are not synchronised."""
    pause = run.payload["pause"]
    await asyncio.sleep(pause * random.random())
    for _ in range(run.payload["events"]):
        await run.emit("tick", time.monotonic_ns())
        await asyncio.sleep(pause * random.uniform(0.8, 1.2))


@action("lock-alone")
async def lock_alone(run: Run) -> list[float]:
    """Acquire a lock without contention, again and again; return the seconds that each took."""
    taken = []
    for _ in range(run.payload["samples"]):
        began = time.monotonic()
        async with lock("alone"):
            pass
        taken.append(time.monotonic() - began)
    return taken


@action("contend")
async def contend(run: Run) -> list[tuple[int, int]]:
    """Acquire a contended lock, again and again; return when each turn began and ended."""
    turns = []
    await asyncio.sleep(max(0.0, run.payload["at"] - time.monotonic()))
    for _ in range(run.payload["turns"]):
        async with lock("contended"):
            began = time.monotonic_ns()
            await asyncio.sleep(0)
            turns.append((began, time.monotonic_ns()))
    return turns


@action("hold-many")
async def hold_many(run: Run) -> None:
    """Hold many locks at the same time."""
    async with AsyncExitStack() as stack:
        for number in range(run.payload["locks"]):
            await stack.enter_async_context(lock(f"one-of-many-{number}"))
        await asyncio.sleep(run.payload["seconds"])
