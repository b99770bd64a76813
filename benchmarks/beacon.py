"""A singleton that records when it begins, and continues until it is ended (`benchmarks/locks.py`)."""

import asyncio

from app.fleet import HeldLock, singleton
from benchmarks import marks


@singleton("beacon")
async def beacon(turn: HeldLock) -> None:
    marks.leave_number(turn.token)
    await asyncio.sleep(3600)
