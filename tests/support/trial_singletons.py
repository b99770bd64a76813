"""A singleton that only tests need: while it runs, it leaves an effect now and then, guarded by its token."""

import asyncio
import os

from app.fleet import Held, session, singleton
from tests.support.trial_actions import EFFECT


@singleton("beacon")
async def beacon(turn: Held) -> None:
    instance = os.environ.get("FLOTILLA_INSTANCE_NAME", str(os.getpid()))
    while True:
        async with session() as transaction:
            shown = {"run": 0, "attempt": 0, "token": turn.token, "instance": instance, "note": "beacon"}
            await transaction.execute(EFFECT, shown)
            await turn.guard(transaction)
        await asyncio.sleep(0.05)
