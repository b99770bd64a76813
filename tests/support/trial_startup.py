"""Resources for tests of real processes. `TRIAL_STARTUP` says what one of them does; `works` is the ordinary case."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

from sqlalchemy import text

from app import startup
from app.fleet import Run, action, provided, resource, transaction, trigger

log = logging.getLogger("trial")
BEHAVIOUR = os.environ.get("TRIAL_STARTUP", "works")


@dataclass
class Lantern:
    lit: bool = True


@dataclass
class Buoy:
    lantern: Lantern


@resource
async def lantern() -> AsyncIterator[Lantern]:
    own = Lantern()
    # The tables are there, and a run can be triggered.
    async with transaction() as session:
        await session.execute(text("SELECT 1"))
        await trigger("look", session=session)
    log.warning("lantern.lit")
    yield own
    own.lit = False
    # The pool is still open.
    async with transaction() as session:
        await session.execute(text("CREATE TABLE public.lantern_out ()"))
    log.warning("lantern.out")


@resource
async def buoy(lantern: Lantern) -> AsyncIterator[Buoy]:
    if BEHAVIOUR == "fails":
        raise ConnectionRefusedError("the buoy does not answer")
    yield Buoy(lantern)
    if BEHAVIOUR == "hangs":
        await asyncio.sleep(3600)
    log.warning("buoy.out")


@action("look")
async def look(_: Run) -> dict[str, bool]:
    return {"lit": provided(Buoy).lantern.lit}


@action("watch")
async def watch(run: Run) -> dict[str, bool]:
    """Look at the lantern once more when this instance is about to leave."""
    log.warning("watch.began")
    await run.stopping.wait()
    log.warning("watch.ended")
    return {"lit": provided(Lantern).lit}


startup.lantern = lantern  # type: ignore[attr-defined]
startup.buoy = buoy  # type: ignore[attr-defined]
