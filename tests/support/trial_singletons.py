"""A singleton for tests: while it runs, it writes effects, guarded by its token."""

import asyncio
import os

from app.fleet import HeldLock, singleton, transaction
from tests.support.trial_actions import EFFECT


@singleton("beacon")
async def beacon(turn: HeldLock) -> None:
    instance = os.environ.get("FLOTILLA_INSTANCE_NAME", str(os.getpid()))
    while True:
        async with transaction() as session:
            shown = {"run": 0, "attempt": 0, "token": turn.token, "instance": instance, "note": "beacon"}
            await session.execute(EFFECT, shown)
            await turn.guard(session)
        await asyncio.sleep(0.05)
