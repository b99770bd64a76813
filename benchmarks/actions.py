"""The actions that benchmarks run (`FLOTILLA_ACTIONS=benchmarks.actions`)."""

import asyncio

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
