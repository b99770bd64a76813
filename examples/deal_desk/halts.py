"""Trading halts: one instance looks every ten seconds, for as long as it lives and stays.

A halt matters within seconds, and looking costs one request: a singleton looks on and on, where a schedule would make a
run each time. When its instance goes, another has the turn a fraction of a second later.

What it writes is guarded by its turn: an instance that was frozen, and goes on after another has begun, commits
nothing. And the halt's primary key has each told once, whoever looks.

An upstream that fails, or is away, is no reason to give up the turn: it is looked at again ten seconds later.
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
    """Keep those that are new, each with its alert."""
    async with transaction() as session:
        for halt in sorted(halts, key=lambda each: each["halt"]):
            values = {"halt": halt["halt"], "company": halt["company"], "token": turn.token}
            row = insert(Halt).values(values).on_conflict_do_nothing().returning(Halt.halt)
            if await session.scalar(row):
                await announce(session, "halt", halt["halt"], f"trading in {halt['company']} is halted")
        await turn.guard(session)
