"""Alerts: triggered in the transaction of their subject, and delivered when the chat has confirmed them.

`announce` inserts the alert and triggers its delivery in the caller's transaction: the queue is the outbox. An alert
exists exactly if its subject does, and is then delivered, in as many attempts as it needs. The first transaction after
the chat's answer sets `delivered_at` and ends the run.

    the chat refuses, or is down        retried, with growing delays
    the chat fails for all alerts       the breaker opens: no calls for a while, then one probe
    the chat does not answer            retried, although it may have the alert: the outcome is unknown
    killed before the answer            the same
    killed between answer and commit    the same, for a few milliseconds

So the chat receives every alert at least once, and more than once only in the last three cases. All attempts of an
alert have the same `Idempotency-Key`: a chat that checks it shows each alert once.

After a thousand attempts the run has failed: `flotilla runs retry-all --action deliver-alert` when the chat works.
"""

import httpx
from pydantic import BaseModel
from sqlalchemy import func, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import BreakerOpen, LimitReached, Run, TryAgain, action, breaker, limit
from examples.deal_desk.settings import desk
from examples.deal_desk.tables import Alert
from examples.deal_desk.upstreams import upstream


class Message(BaseModel):
    """A message to the chat. Kind and subject identify it."""

    kind: str
    subject: str
    message: str


async def announce(transaction: AsyncSession, kind: str, subject: str, message: str) -> None:
    """Order an alert: once per kind and subject, and only if this transaction commits."""
    alert = Message(kind=kind, subject=subject, message=message)
    row = insert(Alert).values(alert.model_dump()).on_conflict_do_nothing().returning(Alert.id)
    if await transaction.scalar(row):
        await deliver_alert.trigger(alert, session=transaction)


@action("deliver-alert", retries=1000, max_retry_delay=desk.max_retry_delay, timeout="1m")
async def deliver_alert(run: Run[Message]) -> None:
    """Post an alert to the chat."""
    alert = run.payload
    try:
        # After an outage there may be many alerts, and a long wait here would use up the concurrency of other runs.
        await limit("chat", desk.chat_rate, wait="20s")
        # Some failures are normal all day. 50 are nearly all calls that the limit allows in ten seconds: an outage.
        async with breaker("chat", failures=50, within="10s", rest="2s"):
            await post(alert)
    except (BreakerOpen, LimitReached) as not_now:
        raise TryAgain(str(not_now), after=not_now.retry_after) from None
    except httpx.HTTPError as failure:
        # Expected, so without a traceback in the log. The run's `error` has the text.
        raise TryAgain(f"{type(failure).__name__} {failure}".strip()) from None
    async with run.commit() as session:
        delivered = update(Alert).where(Alert.kind == alert.kind, Alert.subject == alert.subject)
        await session.execute(delivered.values(delivered_at=func.now(), attempts=run.attempt))


async def post(alert: Message) -> None:
    key = f"{alert.kind}/{alert.subject}"
    async with upstream(desk.chat_patience) as client:
        await client.post("/chat", json=alert.model_dump(), headers={"Idempotency-Key": key})
