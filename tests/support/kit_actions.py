"""Actions for the tests of the testing kit. Each effect is a row of the table `effects`."""

import asyncio
from typing import Any

from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from app.fleet import GiveUp, Order, Run, TryAgain, action, lock, once, transaction, trigger, trigger_many
from app.fleet.testing import reach

INSERT = text("INSERT INTO effects (run, what) VALUES (:run, :what)")
# What actions do outside of PostgreSQL, in the order in which they do it.
done: list[str] = []


class Voyage(BaseModel):
    to: str = "Turku"
    legs: int = 3


async def insert(session: AsyncSession, run: Run[Any], what: str) -> None:
    await session.execute(INSERT, {"run": run.id, "what": what})


@action("sail", retries=2, retry_delay="5m")
async def sail(run: Run[Voyage]) -> None:
    """Sail leg by leg, and note the arrival."""
    for leg in range(run.last_checkpoint or 0, run.payload.legs):
        await run.progress(leg / run.payload.legs)
        await reach("leg")
        await run.checkpoint(leg + 1)
    try:
        async with run.commit({"to": run.payload.to}) as session:
            await insert(session, run, run.payload.to)
    finally:
        done.append(f"finally of attempt {run.attempt}")


@action("sail-twice")
async def sail_twice(run: Run) -> None:
    """Its effect and its end are two transactions: a death in between repeats the effect."""
    async with transaction() as session:
        await insert(session, run, "twice")


@action("sail-guarded")
async def sail_guarded(run: Run) -> None:
    async with transaction() as session:
        await run.guard(session)
        await insert(session, run, "guarded")


@action("sail-in-parts")
async def sail_in_parts(run: Run) -> None:
    """One of its tasks reaches a point while another one sleeps."""

    async def other() -> None:
        await asyncio.sleep(0.05)
        done.append("the other task")

    async with asyncio.TaskGroup() as group:
        group.create_task(other())
        await run.checkpoint("begun")


@action("moor")
def moor(run: Run[Voyage]) -> str:
    """A plain function."""

    def effects(session: Session) -> None:
        session.execute(INSERT, {"run": run.id, "what": run.payload.to})

    run.blocking.checkpoint("at the quay")
    run.blocking.commit(effects)
    return "moored"


@action("fail", retries=1, retry_delay="5m")
async def fail(_: Run) -> None:
    raise ConnectionError("the strait is closed")


@action("wait-a-week", retries=3)
async def wait_a_week(run: Run) -> str:
    if run.attempt == 1:
        raise TryAgain("the strait is closed", after="7d")
    return "arrived"


@action("give-up")
async def give_up(_: Run) -> None:
    raise GiveUp("there is no such port")


@action("fleet-order")
async def fleet_order(run: Run) -> None:
    """Trigger one run of its own, and two in one transaction."""
    await sail.trigger(Voyage(to="Oslo", legs=0), key=f"oslo-{run.id}")
    async with run.commit() as session:
        await trigger_many([Order("moor", {"to": "Riga"}), Order("moor", {"to": "Gdynia"})], session=session)


@action("log-book", every="10m")
async def log_book(run: Run) -> str:
    assert run.scheduled_for is not None
    return run.scheduled_for.isoformat()


@action("only-one", every="1h", overlap="skip")
async def only_one(_: Run) -> None: ...


@action("weekly", cron="0 9 * * 1")
async def weekly(_: Run) -> None: ...


@action("scarce", rate="1/m")
async def scarce(_: Run) -> None: ...


@action("unload-once")
async def unload_once(run: Run) -> str:
    async with once("cargo", "crate-1") as fresh:
        if fresh:
            await insert(fresh.session, run, "unloaded")
    return fresh.state


@action("order-keyed")
async def order_keyed(_: Run) -> None:
    await trigger("moor", key="berth-1")


@action("lift")
async def lift(run: Run) -> None:
    """The lock of a dead attempt must be free for the next one."""
    async with lock("crane", wait="20s"):
        await run.checkpoint("lifted")


@action("again")
async def again(run: Run) -> None:
    await again.trigger(run.payload)
