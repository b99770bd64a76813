"""Trading halts: one instance polls every ten seconds, for as long as it runs.

A halt matters within seconds, and a poll costs one request. So a singleton polls in a loop; a schedule would make a run
for each poll. When its instance ends, another instance takes over within a fraction of a second.

The token of its turn guards its writes: an instance that was frozen, and continues after another one has begun, commits
nothing. The primary key of a halt also prevents a second alert.

If the upstream fails, the singleton keeps its turn and polls again after ten seconds.
"""

import asyncio
import logging

import httpx
from sqlalchemy.dialects.postgresql import insert

from app.fleet import HeldLock, singleton, transaction
from examples.deal_desk.alerts import announce
from examples.deal_desk.settings import desk
from examples.deal_desk.tables import Halt, prepared
from examples.deal_desk.upstreams import upstream

log = logging.getLogger(__name__)


@singleton("halts-monitor")
async def halts_monitor(turn: HeldLock) -> None:
    await prepared()
    while True:
        try:
            async with upstream(patience=5) as client:
                halts: list[dict[str, str]] = (await client.get("/halts")).json()
        except httpx.HTTPError as error:
            log.warning("the halts feed cannot be read: %r", error)
        else:
            await keep(halts, turn)
        await asyncio.sleep(desk.halts_every)


async def keep(halts: list[dict[str, str]], turn: HeldLock) -> None:
    """Store the new halts, each with its alert."""
    async with transaction() as session:
        for halt in sorted(halts, key=lambda each: each["halt"]):
            values = {"halt": halt["halt"], "company": halt["company"], "token": turn.token}
            row = insert(Halt).values(values).on_conflict_do_nothing().returning(Halt.halt)
            if await session.scalar(row):
                await announce(session, "halt", halt["halt"], f"trading in {halt['company']} is halted")
        await turn.guard(session)
