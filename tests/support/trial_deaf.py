"""A singleton that only tests need: it does not end, whoever wants it to."""

import asyncio
from contextlib import suppress

from app.fleet import Held, singleton


@singleton("deaf")
async def deaf(_: Held) -> None:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
