"""The actions of the deal desk survive every death: tested with `app.fleet.testing`, as a service tests its own."""

from itertools import count
from typing import Any

import pytest
from sqlalchemy import select

from app.fleet.testing import Instance, StoredRun, reach
from app.fleet.testing.fixtures import databases, instance, instance_resources
from examples.deal_desk import alerts, research
from examples.deal_desk.alerts import Message, deliver_alert
from examples.deal_desk.research import Subject, research_deal
from examples.deal_desk.tables import Alert, Deal, Payment, prepared

pytestmark = pytest.mark.template

__all__ = ["databases", "instance", "instance_resources"]


@pytest.fixture
def instance_settings() -> dict[str, Any]:
    return {"actions": ("examples.deal_desk",)}


async def test_the_research_on_a_deal_is_paid_once_wherever_the_instance_dies(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = count(1)
    paid: set[str] = set()

    async def buy(deal: str) -> dict[str, Any]:
        paid.add(deal)
        await reach("paid")
        return {"charge": f"charge of {deal}", "report": {"rating": "buy"}}

    async def arrange() -> Subject:
        subject = Subject(deal=f"deal {next(numbers)}")
        async with instance.transaction() as session:
            session.add(Deal(deal=subject.deal, found_in="a test"))
        return subject

    async def effects(run: StoredRun) -> Any:
        async with instance.transaction() as session:
            payment = await session.get_one(Payment, run.payload["deal"])
        ordered = await instance.runs_triggered(deliver_alert, {"kind": "deal", "subject": payment.deal})
        return payment.charge == f"charge of {payment.deal}", payment.deal in paid, len(ordered)

    await prepared()
    monkeypatch.setattr(research, "buy", buy)
    points = await instance.survives(research_deal, arrange, effects)
    assert {point.name for point in points} >= {"guard", "transaction", "paid", "commit"}


async def test_an_alert_is_delivered_with_one_key_wherever_the_instance_dies(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = count(1)
    posted: list[Message] = []

    async def post(alert: Message) -> None:
        posted.append(alert)
        await reach("posted")

    async def arrange() -> Message:
        posted.clear()
        alert = Message(kind="halt", subject=f"halt {next(numbers)}", message="trading is halted")
        async with instance.transaction() as session:
            session.add(Alert(**alert.model_dump()))
        return alert

    async def effects(run: StoredRun) -> Any:
        async with instance.transaction() as session:
            (alert,) = await session.scalars(select(Alert).where(Alert.subject == run.payload["subject"]))
        return alert.delivered_at is not None, {each.subject for each in posted} == {alert.subject}

    await prepared()
    monkeypatch.setattr(alerts, "post", post)
    points = await instance.survives(deliver_alert, arrange, effects)
    assert {point.name for point in points} >= {"posted", "commit"}
