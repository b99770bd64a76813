"""A repeated request makes no second run: it is recognised by its `Idempotency-Key`, or by the key of its run."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from app.fleet.engine.enqueue.keys import TRY_LOCK
from app.fleet.http import idempotency
from tests.integration.test_actions_http import count_runs, get, post
from tests.integration.test_edge import is_problem
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio

SENT = {"idempotency-key": "order-17"}
PARCEL = {"payload": {"weight": 3}}
BATCH: dict[str, Any] = {"runs": [{"action": "echo", "payload": {"n": n}} for n in range(5)]}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits long enough, also on a slow machine."""
    monkeypatch.setattr(idempotency, "TIMEOUT", 60)


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address) as own:
        yield own


def hold(here: LocalInstance, session: psycopg.Connection[Any], key: str) -> None:
    """Take the lock of this key, as a request in progress does."""
    taken = session.execute(here.running.context.database.namespace.sql(TRY_LOCK), {"key": key}).fetchone()
    assert taken == (True,)


# -- one run ----------------------------------------------------------------------------------------------------------


async def test_a_repeated_request_returns_the_same_run_in_its_present_state(here: LocalInstance) -> None:
    first = await post(here, "/actions/weigh/runs", PARCEL, 202, headers=SENT)
    await here.ended(first.json()["id"])
    again = await post(here, "/actions/weigh/runs", PARCEL, 200, headers=SENT)
    assert again.headers["location"] == first.headers["location"]
    assert again.json() == await get(here, f"/runs/{first.json()['id']}")
    assert (again.json()["state"], again.json()["result"]) == ("succeeded", 3)
    assert await count_runs(here) == 1


async def test_a_key_in_the_body_returns_the_same_run(here: LocalInstance) -> None:
    first = (await post(here, "/actions/weigh/runs", PARCEL | {"key": "k"}, 202)).json()
    again = (await post(here, "/actions/weigh/runs", {"payload": {"weight": 4}, "key": "k"}, 200)).json()
    assert (again["id"], again["payload"]["weight"]) == (first["id"], 3)


async def test_each_request_without_a_key_makes_a_new_run(here: LocalInstance) -> None:
    made = {(await post(here, "/actions/weigh/runs", PARCEL, 202)).json()["id"] for _ in range(2)}
    assert len(made) == 2


@pytest.mark.usefixtures("patient")
async def test_concurrent_requests_with_the_same_key_make_one_run(here: LocalInstance) -> None:
    for given in ({"headers": SENT}, {"body": PARCEL | {"key": "k"}}):
        answers = await asyncio.gather(
            *(post(here, "/actions/weigh/runs", **{"body": PARCEL, **given}) for _ in range(20))  # type: ignore[arg-type]
        )
        assert sorted(answer.status_code for answer in answers) == [200] * 19 + [202]
        assert len({answer.json()["id"] for answer in answers}) == 1


async def test_another_body_with_the_same_key_is_refused(here: LocalInstance) -> None:
    await post(here, "/actions/weigh/runs", PARCEL, 202, headers=SENT)
    for body in ({"payload": {"weight": 4}}, PARCEL | {"priority": 1}, PARCEL | {"run_at": "2030-01-01T00:00:00Z"}):
        problem = is_problem(await post(here, "/actions/weigh/runs", body, headers=SENT), "key-reused")
        assert "new key" in str(problem["detail"])
    assert await count_runs(here) == 1


async def test_two_json_texts_with_the_same_meaning_are_the_same_request(here: LocalInstance) -> None:
    send = here.running.client.post
    headers = SENT | {"content-type": "application/json"}
    for status, content in (
        (202, b'{"payload": {"a": 1, "b": 2}, "run_at": "2030-01-01T12:00:00+01:00"}'),
        (200, b'{"run_at":"2030-01-01T11:00:00Z","payload":{"b":2,"a":1},"key":null}'),
    ):
        assert (await send("/actions/echo/runs", content=content, headers=headers)).status_code == status


async def test_a_missing_body_equals_an_empty_object(here: LocalInstance) -> None:
    first = await here.running.client.post("/actions/noop/runs", headers=SENT)
    again = await post(here, "/actions/noop/runs", {}, 200, headers=SENT)
    assert again.json()["id"] == first.json()["id"]


async def test_a_key_in_the_body_takes_precedence_over_the_header(here: LocalInstance) -> None:
    first = (await post(here, "/actions/weigh/runs", PARCEL | {"key": "a"}, 202, headers=SENT)).json()
    second = (await post(here, "/actions/weigh/runs", PARCEL | {"key": "b"}, 202, headers=SENT)).json()
    again = (await post(here, "/actions/weigh/runs", PARCEL | {"key": "a"}, 200)).json()
    assert first["id"] == again["id"] != second["id"]


async def test_two_actions_may_use_the_same_key(here: LocalInstance) -> None:
    await post(here, "/actions/noop/runs", {}, 202, headers=SENT)
    await post(here, "/actions/echo/runs", {}, 202, headers=SENT)


async def test_an_invalid_idempotency_key_is_refused(here: LocalInstance) -> None:
    for key in ("", "k" * 201, "a\tb"):
        for path, body in (("/actions/noop/runs", {}), ("/runs:batch", BATCH)):
            problem = is_problem(await post(here, path, body, headers={"idempotency-key": key}), "invalid")
            assert "Idempotency-Key" in str(problem["detail"])
    await post(here, "/actions/noop/runs", {}, 202, headers={"idempotency-key": "k" * 200})
    await post(here, "/runs:batch", BATCH, 202, headers={"idempotency-key": "k" * 200})


async def test_a_repeated_request_for_an_active_run_is_not_a_conflict(here: LocalInstance) -> None:
    body = {"payload": {"seconds": 60}}
    run = (await post(here, "/actions/alone/runs", body, 202, headers=SENT)).json()
    assert (await post(here, "/actions/alone/runs", body, 200, headers=SENT)).json()["id"] == run["id"]
    is_problem(await post(here, "/actions/alone/runs", body, headers={"idempotency-key": "another"}), "conflict")
    await post(here, f"/runs/{run['id']}/cancel", status=200)


async def test_a_request_that_was_refused_does_not_use_up_its_key(here: LocalInstance) -> None:
    is_problem(await post(here, "/actions/weigh/runs", {"payload": {}}, headers=SENT), "invalid")
    await post(here, "/actions/weigh/runs", PARCEL, 202, headers=SENT)


async def test_the_key_and_the_run_are_inserted_together_or_not_at_all(here: LocalInstance) -> None:
    """If the insert of the run fails, the key is rolled back with it."""
    await here.sql("ALTER TABLE runs ADD CONSTRAINT refused CHECK (priority <> 13)")
    body = PARCEL | {"priority": 13}
    assert (await post(here, "/actions/weigh/runs", body, headers=SENT)).status_code == 500
    assert await here.sql("SELECT * FROM run_keys") == []
    await here.sql("ALTER TABLE runs DROP CONSTRAINT refused")
    await post(here, "/actions/weigh/runs", body, 202, headers=SENT)
    assert len(await here.sql("SELECT * FROM run_keys")) == 1 == await count_runs(here)


# -- in flight --------------------------------------------------------------------------------------------------------


async def test_a_second_request_with_a_key_in_flight_waits_and_is_then_refused_with_retry_after(
    here: LocalInstance, address: str
) -> None:
    with psycopg.connect(address) as other:
        hold(here, other, "weigh:order-17")
        began = time.monotonic()
        refused = await post(here, "/actions/weigh/runs", PARCEL, headers=SENT)
        assert time.monotonic() - began >= idempotency.TIMEOUT
        is_problem(refused, "key-in-flight")
        assert refused.headers["retry-after"] == "1"
        assert await count_runs(here) == 0
    await post(here, "/actions/weigh/runs", PARCEL, 202, headers=SENT)


@pytest.mark.usefixtures("patient")
async def test_a_second_request_returns_the_run_if_the_first_ends_in_time(here: LocalInstance, address: str) -> None:
    first = (await post(here, "/actions/weigh/runs", PARCEL, 202, headers=SENT)).json()
    with psycopg.connect(address) as other:
        hold(here, other, "weigh:order-17")
        tries = borrowed(here)
        waiting = asyncio.create_task(post(here, "/actions/weigh/runs", PARCEL, 200, headers=SENT))
        await soon(lambda: has_borrowed(here, tries + 3))
        assert not waiting.done()
        other.rollback()
    assert (await waiting).json()["id"] == first["id"]


@pytest.mark.usefixtures("patient")
async def test_requests_that_wait_for_a_key_hold_no_connection(address: str) -> None:
    # If they held the connections, another request would wait for one for less time than they wait for the key.
    async with local_instance(address, pool_min=1, pool_max=5, pool_timeout=20) as here:
        with psycopg.connect(address) as other:
            hold(here, other, "weigh:order-17")
            tries = borrowed(here)
            waiting = [asyncio.create_task(post(here, "/actions/weigh/runs", PARCEL, headers=SENT)) for _ in range(20)]
            await soon(lambda: has_borrowed(here, tries + 40))
            await post(here, "/actions/echo/runs", status=202)
            other.rollback()
        answers = await asyncio.gather(*waiting)
        assert len({answer.json()["id"] for answer in answers}) == 1


def borrowed(here: LocalInstance) -> int:
    """Return how often a connection was borrowed."""
    return here.running.context.database.stats()["requests_num"]


async def has_borrowed(here: LocalInstance, times: int) -> bool:
    return borrowed(here) >= times


# -- batches ----------------------------------------------------------------------------------------------------------


async def test_a_repeated_batch_returns_the_same_runs_in_the_same_order(here: LocalInstance) -> None:
    first = (await post(here, "/runs:batch", BATCH, 202, headers=SENT)).json()["runs"]
    for run in first:
        await here.ended(run["id"])
    again = (await post(here, "/runs:batch", BATCH, 200, headers=SENT)).json()["runs"]
    assert [run["id"] for run in again] == [run["id"] for run in first]
    assert [run["result"] for run in again] == [{"n": n} for n in range(5)]
    assert await count_runs(here) == 5


@pytest.mark.usefixtures("patient")
async def test_concurrent_requests_with_the_same_batch_return_the_same_runs(here: LocalInstance) -> None:
    answers = await asyncio.gather(*(post(here, "/runs:batch", BATCH, headers=SENT) for _ in range(10)))
    assert sorted(answer.status_code for answer in answers) == [200] * 9 + [202]
    assert len({tuple(run["id"] for run in answer.json()["runs"]) for answer in answers}) == 1


async def test_any_different_batch_with_the_same_key_is_refused(here: LocalInstance) -> None:
    await post(here, "/runs:batch", BATCH, 202, headers=SENT)
    runs = BATCH["runs"]
    others = [
        runs[:-1],
        [*runs, {"action": "noop"}],
        runs[::-1],
        [{"action": "noop"}],
        [{"action": "noop", "key": "k"}],
    ]
    for other in others:
        is_problem(await post(here, "/runs:batch", {"runs": other}, headers=SENT), "key-reused")
    assert await count_runs(here) == 5


async def test_an_order_with_its_own_key_keeps_that_key_in_a_batch(here: LocalInstance) -> None:
    single = (await post(here, "/actions/echo/runs", {"key": "mine"}, 202)).json()
    orders = {"runs": [{"action": "echo", "key": "mine"}, {"action": "echo"}]}
    first = (await post(here, "/runs:batch", orders, 202, headers=SENT)).json()["runs"]
    assert first[0]["id"] == single["id"] != first[1]["id"]
    again = (await post(here, "/runs:batch", orders, 200, headers=SENT)).json()["runs"]
    assert [run["id"] for run in again] == [run["id"] for run in first]


async def test_a_batch_whose_key_is_in_flight_is_refused(here: LocalInstance, address: str) -> None:
    with psycopg.connect(address) as other:
        hold(here, other, "runs:batch:order-17")
        is_problem(await post(here, "/runs:batch", BATCH, headers=SENT), "key-in-flight")


async def test_the_key_of_a_batch_is_stored_with_its_first_run(here: LocalInstance) -> None:
    first = (await post(here, "/runs:batch", BATCH, 202, headers=SENT)).json()["runs"][0]
    stored = await here.sql("SELECT run_id FROM run_keys WHERE action_id = 0")
    assert stored == [(first["id"],)]
