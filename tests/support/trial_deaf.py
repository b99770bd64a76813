"""A singleton for tests that ignores its cancellation."""

import asyncio
from contextlib import suppress

from app.fleet import HeldLock, singleton


@singleton("deaf")
async def deaf(_: HeldLock) -> None:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
