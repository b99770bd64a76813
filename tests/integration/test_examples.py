"""The example service: a mailing is inserted together with its run, sent once, and deleted after some weeks."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import psycopg
import pytest
from starlette.types import Message, Receive, Scope, Send

from app.actions import mailings as actions
from app.fleet import Action
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio

MAILING = {"subject": "We sail on Friday", "recipients": [f"sailor-{number}@fleet.example" for number in range(5)]}
COUNTS = "SELECT (SELECT count(*) FROM flotilla.mailings), (SELECT count(*) FROM flotilla.runs)"


@pytest.fixture
async def office(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address, actions=("app.actions",)) as own:
        yield own


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Replace the delivery, and return the recipients and keys of all deliveries."""
    deliveries: list[tuple[str, str]] = []

    async def deliver(recipient: str, _: str, *, key: str) -> None:
        deliveries.append((recipient, key))

    monkeypatch.setattr(actions, "deliver", deliver)
    return deliveries


async def post(office: LocalInstance, body: Any = MAILING) -> httpx.Response:
    return await office.running.client.post("/mailings", json=body)


async def wait_until_sent(office: LocalInstance, path: str) -> dict[str, Any]:
    """Wait until the mailing has been sent, and return it."""

    async def read_sent() -> dict[str, Any] | None:
        mailing: dict[str, Any] = (await office.running.client.get(path)).json()
        return mailing if mailing["sent_at"] else None

    return await soon(read_sent)


async def find_run(office: LocalInstance) -> int:
    """Return the id of the only run of `send-mailing`, from `runs` or `finished_runs`."""
    ((run_id,),) = await office.sql(
        "SELECT r.id FROM (SELECT id, action_id FROM runs UNION ALL SELECT id, action_id FROM finished_runs) AS r "
        "JOIN actions AS a ON a.id = r.action_id WHERE a.name = 'send-mailing'"
    )
    return int(run_id)


# -- the route --------------------------------------------------------------------------------------------------------


async def test_a_posted_mailing_is_accepted_and_then_sent(office: LocalInstance) -> None:
    accepted = await post(office)
    assert accepted.status_code == 201
    assert accepted.json().items() >= {**MAILING, "delivered": None, "sent_at": None}.items()
    mailing = await wait_until_sent(office, accepted.headers["location"])
    assert mailing["id"] == accepted.json()["id"]
    assert mailing["delivered"] == 5


async def test_the_mailing_and_its_run_are_committed_before_the_response_begins(
    office: LocalInstance, address: str
) -> None:
    """Another session counts the rows at the moment at which the response begins."""
    seen: list[tuple[int, ...]] = []
    await office.sql("UPDATE actions SET paused_at = now()")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                async with await psycopg.AsyncConnection.connect(address) as other:
                    seen.extend(await (await other.execute(COUNTS)).fetchall())
            await send(message)

        await office.running.app(scope, receive, send_and_count)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        assert (await client.post("/mailings", json=MAILING)).status_code == 201
    assert seen == [(1, 1)]


async def test_a_route_that_fails_after_its_trigger_leaves_neither_mailing_nor_run(
    office: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    triggered = []
    trigger = Action.trigger

    async def trigger_and_fail(*given: Any, **more: Any) -> int:
        triggered.append(await trigger(*given, **more))
        raise RuntimeError("something else went wrong")

    monkeypatch.setattr(Action, "trigger", trigger_and_fail)
    assert (await post(office)).status_code == 500
    assert len(triggered) == 1
    assert await office.sql(COUNTS) == [(0, 0)]
    assert await office.sql("SELECT FROM finished_runs") == []


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
    office: LocalInstance, wrong: dict[str, Any], field: str
) -> None:
    answer = await post(office, MAILING | wrong)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field
    assert await office.sql(COUNTS) == [(0, 0)]


@pytest.mark.parametrize(("mailing", "status"), [("1", 404), (str(2**63), 422)])
async def test_an_unknown_mailing_is_404_and_an_invalid_id_422(
    office: LocalInstance, mailing: str, status: int
) -> None:
    assert (await office.running.client.get(f"/mailings/{mailing}")).status_code == status


# -- the actions ------------------------------------------------------------------------------------------------------


async def test_each_recipient_receives_the_mailing_once_with_its_own_key(
    office: LocalInstance, delivered: list[tuple[str, str]]
) -> None:
    await wait_until_sent(office, (await post(office)).headers["location"])
    run = await office.read(await find_run(office))
    assert (run.state, run.result) == ("succeeded", {"delivered": 5})
    assert run.progress == {"done": 1, "text": "5 of 5"}
    assert delivered == [(each, f"{run.id}-{number}") for number, each in enumerate(MAILING["recipients"])]


async def test_an_attempt_continues_after_the_last_recipient_in_the_checkpoint(
    office: LocalInstance, delivered: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver = actions.deliver

    async def deliver_and_fail_once(recipient: str, subject: str, *, key: str) -> None:
        if len(delivered) == 2:
            delivered.append(("nobody: the connection broke", key))
            raise ConnectionError
        await deliver(recipient, subject, key=key)

    monkeypatch.setattr(actions, "deliver", deliver_and_fail_once)
    mailing = await wait_until_sent(office, (await post(office)).headers["location"])
    assert mailing["delivered"] == 5
    assert (await office.read(await find_run(office))).attempt == 2
    assert [each for each, _ in delivered if "nobody" not in each] == MAILING["recipients"]


async def test_only_mailings_that_were_sent_long_ago_are_deleted(office: LocalInstance) -> None:
    await office.sql(
        "INSERT INTO mailings (subject, recipients, sent_at) VALUES ('never sent', '{}', NULL), "
        "('sent lately', '{}', now() - interval '29 days'), ('sent long ago', '{}', now() - interval '31 days')"
    )
    run = await office.run("forget-mailings")
    assert (run.state, run.result) == ("succeeded", {"forgotten": 1})
    left = await office.sql("SELECT subject FROM mailings ORDER BY id")
    assert left == [("never sent",), ("sent lately",)]


async def test_the_deletion_of_old_mailings_is_scheduled(office: LocalInstance) -> None:
    await office.sql("UPDATE actions SET next_run_at = now() WHERE name = 'forget-mailings'")
    office.engine.scheduler.schedule_now()
    (page,) = await soon(lambda: office.sql("SELECT trigger, result FROM finished_runs"))
    assert page == ("schedule", {"forgotten": 0})
