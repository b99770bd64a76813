"""Alerts: ordered in the transaction of what they are about, and called delivered only after the chat has said so.

`announce` writes the alert and triggers its delivery in the caller's transaction: the queue is the outbox. An alert is
there exactly if what it tells of is, and then it is delivered, in however many attempts. `delivered_at` and the end of
the run are one transaction, the first one after the chat's answer.

    the chat refuses, or is down        tried again, with growing waits
    it fails for everybody              the breaker opens: for a while nobody asks, and then one does
    it does not answer                  tried again, although it may have it: nobody here can know
    killed before the answer            the same
    killed between answer and commit    the same: a few milliseconds, in which only its record knows better

So the chat has every alert at least once, and twice only in the last three cases. `Idempotency-Key` is the same in all
attempts at one alert: a chat that looks at it shows each once.

An alert that was tried a thousand times has failed: `flotilla runs retry-all --action deliver-alert` when the chat is
back.
"""

import httpx
from pydantic import BaseModel
from sqlalchemy import func, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import BreakerOpen, LimitReached, Run, TryAgain, action, breaker, limit, trigger
from examples.deal_desk.settings import desk
from examples.deal_desk.tables import Alert
from examples.deal_desk.upstreams import upstream


class Message(BaseModel):
    """What the chat is sent; the first two tell it by."""

    kind: str
    subject: str
    message: str


async def announce(transaction: AsyncSession, kind: str, subject: str, message: str) -> None:
    """Have this told: once for each subject of its kind, and exactly if this transaction commits."""
    told = Message(kind=kind, subject=subject, message=message)
    row = insert(Alert).values(told.model_dump()).on_conflict_do_nothing().returning(Alert.id)
    if await transaction.scalar(row):
        await trigger(deliver_alert, told, session=transaction)


@action("deliver-alert", retries=1000, max_retry_delay=desk.max_retry_delay, timeout="1m")
async def deliver_alert(run: Run[Message]) -> None:
    """Post an alert to the chat."""
    alert = run.payload
    try:
        # After an outage there may be many, and to wait here for long would take places from others.
        await limit("chat", desk.chat_rate, wait="20s")
        # It fails now and then all day long. Nearly all that the limit lets through in ten seconds is another matter.
        async with breaker("chat", failures=50, within="10s", rest="2s"):
            await post(alert)
    except (BreakerOpen, LimitReached) as not_now:
        raise TryAgain(str(not_now), after=not_now.retry_after) from None
    except httpx.HTTPError as failure:
        # Expected, and no reason for a traceback in the log: the run's `error` says what it was.
        raise TryAgain(f"{type(failure).__name__} {failure}".strip()) from None
    async with run.commit() as session:
        delivered = update(Alert).where(Alert.kind == alert.kind, Alert.subject == alert.subject)
        await session.execute(delivered.values(delivered_at=func.now(), attempts=run.attempt))


async def post(alert: Message) -> None:
    key = f"{alert.kind}/{alert.subject}"
    async with upstream(desk.chat_patience) as client:
        await client.post("/chat", json=alert.model_dump(), headers={"Idempotency-Key": key})
