"""The actions that benchmarks run (`FLOTILLA_ACTIONS=benchmarks.actions`)."""

import asyncio
import random
import time

from app.fleet import Run, action
from benchmarks import marks


@action("noop")
async def noop(_: Run) -> None:
    """Do nothing."""


@action("mark")
async def mark(run: Run) -> None:
    """Say that it began."""
    marks.leave(run)


@action("linger")
async def linger(run: Run) -> None:
    """Say that it began, and go on until it is cancelled or its process is killed."""
    marks.leave(run)
    await asyncio.sleep(3600)


@action("linger-quietly")
async def linger_quietly(_: Run) -> None:
    """Go on until it is cancelled."""
    await asyncio.sleep(3600)


@action("talk")
async def talk(run: Run) -> None:
    """Say as much as fast as it can."""
    for number in range(run.payload["events"]):
        await run.emit("said", number)


@action("tick", timeout="1h")
async def tick(run: Run) -> None:
    """Say when it says it, again and again, not in step with others."""
    pause = run.payload["pause"]
    await asyncio.sleep(pause * random.random())
    for _ in range(run.payload["events"]):
        await run.emit("tick", time.monotonic_ns())
        await asyncio.sleep(pause * random.uniform(0.8, 1.2))
