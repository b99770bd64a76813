"""An example, to read and to delete: the tests of the mailings, with `app.fleet.testing` and nothing else."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select
from starlette.types import Message, Receive, Scope, Send

from app.actions import mailings as actions
from app.actions.mailings import Letters, forget_mailings, send_mailing
from app.fleet import Action
from app.fleet.testing import Instance, StoredRun, dies_at
from app.models import Mailing

SUBJECT = "We sail on Friday"
RECIPIENTS = [f"sailor-{number}@fleet.example" for number in range(3)]
MAILING = {"subject": SUBJECT, "recipients": RECIPIENTS}


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Replace the delivery, and return the recipients and keys of all deliveries."""
    deliveries: list[tuple[str, str]] = []

    async def deliver(recipient: str, _: str, *, key: str) -> None:
        deliveries.append((recipient, key))

    monkeypatch.setattr(actions, "deliver", deliver)
    return deliveries


async def count(instance: Instance) -> tuple[int, int]:
    """Return the number of mailings, and of runs that send one."""
    async with instance.transaction() as session:
        mailings = await session.scalar(select(func.count()).select_from(Mailing))
    return mailings or 0, len(await instance.runs_triggered(send_mailing))


# -- the route --------------------------------------------------------------------------------------------------------


async def test_a_posted_mailing_is_accepted_and_then_sent(instance: Instance, delivered: list[tuple[str, str]]) -> None:
    accepted = await instance.client.post("/mailings", json=MAILING)
    assert accepted.status_code == 201
    assert accepted.json().items() >= {**MAILING, "delivered": None, "sent_at": None}.items()

    (run,) = await instance.run_due()
    assert (run.state, run.result) == ("succeeded", {"delivered": 3})
    mailing = (await instance.client.get(accepted.headers["location"])).json()
    assert mailing["delivered"] == len(delivered) == 3


async def test_the_mailing_and_its_run_are_committed_before_the_response_begins(instance: Instance) -> None:
    """Another session counts the rows at the moment at which the response begins."""
    seen: list[tuple[int, int]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.append(await count(instance))
            await send(message)

        await instance.app(scope, receive, count_and_send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        assert (await client.post("/mailings", json=MAILING)).status_code == 201
    assert seen == [(1, 1)]


async def test_a_route_that_fails_after_its_trigger_leaves_neither_mailing_nor_run(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    triggered = []
    trigger = Action.trigger

    async def trigger_and_fail(*given: Any, **more: Any) -> int:
        triggered.append(await trigger(*given, **more))
        raise RuntimeError("something else went wrong")

    monkeypatch.setattr(Action, "trigger", trigger_and_fail)
    assert (await instance.client.post("/mailings", json=MAILING)).status_code == 500
    assert len(triggered) == 1
    assert await count(instance) == (0, 0)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"subject": " "}, "subject"),
        ({"subject": "a\x00b"}, "subject"),
        ({"recipients": []}, "recipients"),
        ({"recipients": ["nobody"]}, "recipients.0"),
        ({"recipients": ["a@b"] * 1001}, "recipients"),
    ],
)
async def test_an_invalid_mailing_is_refused_and_neither_mailing_nor_run_is_inserted(
    instance: Instance, wrong: dict[str, Any], field: str
) -> None:
    answer = await instance.client.post("/mailings", json=MAILING | wrong)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field
    assert await count(instance) == (0, 0)


async def test_an_unknown_mailing_is_404_and_an_invalid_id_422(instance: Instance) -> None:
    assert (await instance.client.get("/mailings/1")).status_code == 404
    assert (await instance.client.get(f"/mailings/{2**63}")).status_code == 422


# -- the actions ------------------------------------------------------------------------------------------------------


async def arrange(instance: Instance) -> Letters:
    """Store a mailing, and return what its run is given."""
    async with instance.transaction() as session:
        mailing = Mailing(subject=SUBJECT, recipients=RECIPIENTS)
        session.add(mailing)
        await session.flush()
        return Letters(mailing=mailing.id, subject=SUBJECT, recipients=RECIPIENTS)


async def test_each_recipient_receives_the_mailing_once_with_its_own_key(
    instance: Instance, delivered: list[tuple[str, str]]
) -> None:
    run = await instance.run(send_mailing, await arrange(instance))
    assert run.progress == {"done": 1, "text": "3 of 3"}
    assert delivered == [(each, f"{run.id}-{number}") for number, each in enumerate(RECIPIENTS)]


async def test_an_attempt_continues_after_the_last_recipient_in_the_checkpoint(
    instance: Instance, delivered: list[tuple[str, str]]
) -> None:
    """A delivery whose checkpoint was not stored is repeated, with the same key."""
    run = await instance.run(send_mailing, await arrange(instance), dies_at("checkpoint", 2))
    assert (run.state, run.attempt) == ("succeeded", 2)
    assert [key for _, key in delivered] == [f"{run.id}-{number}" for number in (0, 1, 1, 2)]


async def test_a_mailing_is_sent_to_all_of_its_recipients_wherever_the_instance_dies(
    instance: Instance, delivered: list[tuple[str, str]]
) -> None:
    async def sent(run: StoredRun) -> Any:
        recipients = {recipient for recipient, key in delivered if key.startswith(f"{run.id}-")}
        async with instance.transaction() as session:
            mailing = await session.get_one(Mailing, run.payload["mailing"])
            return mailing.delivered, recipients

    points = await instance.survives(send_mailing, lambda: arrange(instance), sent)
    assert ("commit", 1) in points
    assert ("checkpoint", 3) in points


async def test_only_mailings_that_were_sent_long_ago_are_deleted(instance: Instance) -> None:
    ages = {"never sent": None, "sent lately": timedelta(days=29), "sent long ago": timedelta(days=31)}
    async with instance.transaction() as session:
        for subject, age in ages.items():
            sent_at = None if age is None else datetime.now(UTC) - age
            session.add(Mailing(subject=subject, recipients=[], sent_at=sent_at))
    run = await instance.run(forget_mailings)
    assert (run.state, run.result) == ("succeeded", {"forgotten": 1})
    async with instance.transaction() as session:
        left = await session.scalars(select(Mailing.subject).order_by(Mailing.id))
        assert left.all() == ["never sent", "sent lately"]


async def test_old_mailings_are_deleted_every_hour(instance: Instance) -> None:
    runs = await instance.run_for("3h1m", forget_mailings)
    assert [(run.action, run.trigger, run.result) for run in runs] == [
        ("forget-mailings", "schedule", {"forgotten": 0})
    ] * 3
