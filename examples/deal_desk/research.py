"""Research: each call costs money, and each deal is paid for once, whoever is killed wherever.

A call to somebody else cannot be part of a transaction: a process that dies after the call and before its commit has
paid, and nothing here knows. So it takes two.

    1  `Payment` is written, and committed: from here on it is known that somebody may have paid
    2  the call, with `Idempotency-Key`: the deal itself, the same in every attempt, from every instance
    3  its report is kept, the alert about it ordered, and the run ended: one transaction

    killed before 1              nothing happened
    killed between 1 and 3       called again, under the same key: the upstream has charged for that key already, and
                                 gives what it gave. **It is the key that makes this exact**, and nothing on our side
                                 could
    killed after 3               the report is there, and nobody calls
    two want the same deal       its primary key, and the run's key, make it one run
    the call is cut short        as if killed: charged or not, the next attempt's key finds out

For an upstream without such keys, 1 is all there is: after a death between 1 and 3, a person looks into the upstream's
bill before anybody calls again. That is at most once, and no longer by itself.
"""

from typing import Any

from pydantic import BaseModel
from sqlalchemy import update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import Run, action, limit, transaction, trigger
from examples.deal_desk.alerts import announce
from examples.deal_desk.settings import desk
from examples.deal_desk.tables import Deal, Payment
from examples.deal_desk.upstreams import upstream


class Subject(BaseModel):
    deal: str


async def open_deal(transaction: AsyncSession, deal: str, *, found_in: str) -> None:
    """Keep a deal that nobody knew, and order its research: together with whatever else this transaction does."""
    row = insert(Deal).values(deal=deal, found_in=found_in).on_conflict_do_nothing().returning(Deal.deal)
    if await transaction.scalar(row):
        await trigger(research_deal, Subject(deal=deal), key=deal, session=transaction)


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
    """Write down that a call follows; False if there is a report, and none may."""
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
