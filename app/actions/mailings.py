"""An example, to read and to delete: a mailing is sent, one recipient after the other, and one day forgotten.

Whichever instance sends it may be killed half-way. Another goes on after the last recipient that a checkpoint knows of,
and the mailing is marked as sent exactly once, because that happens in the transaction that completes the run.
"""

import asyncio
from datetime import timedelta

from pydantic import BaseModel
from sqlalchemy import delete, func, update

from app.fleet import Run, action
from app.models import Mailing

KEPT = timedelta(days=30)


class Letters(BaseModel):
    mailing: int
    subject: str
    recipients: list[str]


@action("send-mailing", timeout="15m")
async def send_mailing(run: Run[Letters]) -> None:
    """Send a mailing to each of its recipients."""
    letters = run.payload
    count = len(letters.recipients)
    # From where the attempt before this one came to, if there was one.
    for number in range(run.last_checkpoint or 0, count):
        await deliver(letters.recipients[number], letters.subject, key=f"{run.id}-{number}")
        await run.progress((number + 1) / count, f"{number + 1} of {count}")
        await run.checkpoint(number + 1)
    async with run.commit({"delivered": count}) as session:
        sent = update(Mailing).where(Mailing.id == letters.mailing)
        await session.execute(sent.values(delivered=count, sent_at=func.now()))


@action("forget-mailings", every="1h", overlap="skip")
async def forget_mailings(run: Run) -> None:
    """Delete what was sent more than 30 days ago."""
    async with run.commit() as session:
        old = delete(Mailing).where(Mailing.sent_at < func.now() - KEPT)
        forgotten = await session.scalars(old.returning(Mailing.id))
        run.result = {"forgotten": len(forgotten.all())}


async def deliver(recipient: str, subject: str, *, key: str) -> None:  # noqa: ARG001 — what a provider would want
    """Stand for a call to your mail provider; nothing is sent.

    After a kill between a delivery and its checkpoint it is delivered again, under the same key: give the key to the
    provider, who can tell.
    """
    await asyncio.sleep(0.05)
