"""An example, to read and to delete: one action sends a mailing to its recipients, another deletes old mailings.

The instance that sends a mailing may be killed at any point. Another instance then continues after the recipient of the
last checkpoint. The mailing is marked as sent exactly once: in the transaction that completes the run.
"""

import asyncio
from datetime import timedelta

from pydantic import BaseModel
from sqlalchemy import delete, func, update

from app.fleet import Run, action
from app.models import Mailing

RETENTION = timedelta(days=30)


class Letters(BaseModel):
    mailing: int
    subject: str
    recipients: list[str]


@action("send-mailing", timeout="15m")
async def send_mailing(run: Run[Letters]) -> None:
    """Send a mailing to each of its recipients."""
    letters = run.payload
    count = len(letters.recipients)
    # Continue after the last checkpoint of an earlier attempt, if there was one.
    for number in range(run.last_checkpoint or 0, count):
        await deliver(letters.recipients[number], letters.subject, key=f"{run.id}-{number}")
        await run.progress((number + 1) / count, f"{number + 1} of {count}")
        await run.checkpoint(number + 1)
    async with run.commit({"delivered": count}) as session:
        sent = update(Mailing).where(Mailing.id == letters.mailing)
        await session.execute(sent.values(delivered=count, sent_at=func.now()))


@action("forget-mailings", every="1h", overlap="skip")
async def forget_mailings(run: Run) -> None:
    """Delete mailings that were sent more than 30 days ago."""
    async with run.commit() as session:
        old = delete(Mailing).where(Mailing.sent_at < func.now() - RETENTION)
        forgotten = await session.scalars(old.returning(Mailing.id))
        run.result = {"forgotten": len(forgotten.all())}


async def deliver(recipient: str, subject: str, *, key: str) -> None:
    """Stand in for a call to your mail provider; nothing is sent.

    If the instance is killed between a delivery and its checkpoint, the message is delivered again with the same key.
    Pass the key to the provider, so that it can discard the second one.
    """
    await asyncio.sleep(0.05)
