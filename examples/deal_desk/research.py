"""Research: each call costs money, and each deal is paid once, even if instances are killed at any point.

A call to another service cannot be part of a transaction: a process that dies after the call and before its commit has
paid, and the desk does not know it. So there are three steps.

    1  insert `Payment` and commit: from now on it is known that a call may have been paid
    2  call, with the deal as `Idempotency-Key`: the same key in every attempt, from every instance
    3  store the report, order its alert and end the run: one transaction

    killed before 1              nothing happened
    killed between 1 and 3       called again with the same key: the upstream has already charged for this key, and
                                 repeats its answer. **The key makes the payment exactly-once**; the desk alone could
                                 not
    killed after 3               the report exists, and no call follows
    two runs for the same deal   prevented by the primary key and by the key of the run
    the call is aborted          as if killed: the next attempt uses the same key

If an upstream has no such keys, only step 1 remains: after a death between 1 and 3, a person checks the upstream's bill
before the next call. That is at most once, and not automatic.
"""

from typing import Any

from pydantic import BaseModel
from sqlalchemy import update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import Run, action, limit, transaction
from examples.deal_desk.alerts import announce
from examples.deal_desk.settings import desk
from examples.deal_desk.tables import Deal, Payment
from examples.deal_desk.upstreams import upstream


class Subject(BaseModel):
    deal: str


async def open_deal(transaction: AsyncSession, deal: str, *, found_in: str) -> None:
    """Store a new deal and trigger its research, in the caller's transaction."""
    row = insert(Deal).values(deal=deal, found_in=found_in).on_conflict_do_nothing().returning(Deal.deal)
    if await transaction.scalar(row):
        await research_deal.trigger(Subject(deal=deal), key=deal, session=transaction)


@action("research-deal", retries=100, max_retry_delay=desk.max_retry_delay, timeout="2m", concurrency=4)
async def research_deal(run: Run[Subject]) -> None:
    """Buy the research on a deal, once."""
    deal = run.payload.deal
    if not await intend(run, deal):
        return
    bought = await buy(deal)
    async with run.commit({"charge": bought["charge"]}) as transaction:
        kept = update(Payment).where(Payment.deal == deal).values(charge=bought["charge"], report=bought["report"])
        await transaction.execute(kept)
        await announce(transaction, "deal", deal, f"research on {deal}: {bought['report']['rating']}")


async def intend(run: Run[Subject], deal: str) -> bool:
    """Record that a call follows. Return False if the report already exists, so that no call may follow."""
    call = insert(Payment).values(deal=deal, calls=1)
    again = call.on_conflict_do_update(
        index_elements=[Payment.deal], set_={"calls": Payment.calls + 1}, where=Payment.charge.is_(None)
    )
    async with transaction() as session:
        calls = await session.scalar(again.returning(Payment.calls))
        await run.guard(session)
    return calls is not None


async def buy(deal: str) -> dict[str, Any]:
    await limit("research", desk.research_rate)
    async with upstream() as client:
        answer = await client.post("/research", json={"deal": deal}, headers={"Idempotency-Key": deal})
    bought: dict[str, Any] = answer.json()
    return bought
