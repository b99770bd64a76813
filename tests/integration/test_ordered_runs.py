"""Lines in a service: what begins the next run, where nobody looks for what was not told; and lines over REST."""

import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.maintenance import reconciler
from app.fleet.engine.maintenance.rescuer import sweep
from app.fleet.errors import AlreadyActive, RunNotReady
from app.fleet.runs.cancel import cancel_run
from tests.support.engine_harness import NAMESPACE
from tests.support.ordered import NUMBERED, READ_EFFECTS, runs_by_key
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio


async def by_line(here: LocalInstance) -> dict[str, list[int]]:
    return runs_by_key(await here.sql(READ_EFFECTS))


async def all_ended(here: LocalInstance) -> bool:
    return await here.sql("SELECT count(*) FROM runs") == [(0,)]


@pytest.fixture
async def here(address: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalInstance]:
    """A service in which nobody looks for what was not told."""
    monkeypatch.setattr(reconciler, "INTERVAL", 3600.0)
    async with local_instance(address) as own:
        # One of its own accord, at the start.
        await soon(lambda: looked(own))
        await own.sql(NUMBERED)
        yield own


async def looked(here: LocalInstance) -> bool:
    return here.engine.reconciler.reads > 0


async def test_two_hundred_runs_of_five_lines_keep_their_order_through_failures(here: LocalInstance) -> None:
    chance = random.Random(5)
    orders = [
        Order(
            "step",
            {"seconds": chance.choice((0, 0, 0.005, 0.02)), "failures": chance.choice((0, 0, 0, 1, 2)), "after": 0.01},
            ordering_key=f"line-{chance.randrange(5)}",
        )
        for _ in range(200)
    ]
    made = await here.trigger_all(orders)
    plain = await here.trigger_all([Order("step", {"failures": 1, "after": 0.01})] * 20)
    await soon(lambda: all_ended(here), within=60)
    ended = await by_line(here)
    for key in {order.ordering_key for order in orders}:
        wanted = [run_id for run_id, order in zip(made, orders, strict=True) if order.ordering_key == key]
        assert ended[str(key)] == wanted
    assert {(await here.look(run_id)).state for run_id in plain} == {"succeeded"}


async def test_a_run_that_fails_for_good_lets_its_line_go_on(here: LocalInstance) -> None:
    failed = await here.trigger("give-up", ordering_key="a")
    next_ = await here.trigger("give-up", ordering_key="a")
    assert [(await here.ended(each)).state for each in (failed, next_)] == ["failed", "failed"]
    first, second = [await here.look(each) for each in (failed, next_)]
    assert first.finished_at is not None
    assert second.started_at is not None
    assert second.started_at >= first.finished_at


async def test_a_run_that_is_cancelled_while_it_waits_lets_its_line_go_on_at_once(here: LocalInstance) -> None:
    head = await here.trigger("step", ordering_key="a", run_at=datetime.now(UTC) + timedelta(hours=1))
    next_ = await here.trigger("step", ordering_key="a")
    other = await here.run("step", ordering_key="b")
    assert other.state == "succeeded"
    assert (await here.look(next_)).state == "pending"
    (await here.running.client.post(f"/runs/{head}/cancel")).raise_for_status()
    assert (await here.ended(next_)).state == "succeeded"


async def test_a_run_that_is_cancelled_while_it_runs_lets_its_line_go_on(here: LocalInstance) -> None:
    head = await here.trigger("step", {"seconds": 3600}, ordering_key="a")
    next_ = await here.trigger("step", ordering_key="a")
    await here.attempt(head)
    (await here.running.client.post(f"/runs/{head}/cancel")).raise_for_status()
    assert (await here.ended(head)).state == "cancelled"
    assert (await here.ended(next_)).state == "succeeded"


async def test_a_run_that_is_hurried_lets_its_line_go_on(here: LocalInstance) -> None:
    head = await here.trigger("step", ordering_key="a", run_at=datetime.now(UTC) + timedelta(hours=1))
    next_ = await here.trigger("step", ordering_key="a")
    (await here.running.client.post(f"/runs/{head}/retry")).raise_for_status()
    assert (await here.ended(next_)).state == "succeeded"
    assert (await by_line(here))["a"] == [head, next_]


async def test_a_run_for_later_is_begun_when_its_time_comes_and_the_line_after_it(here: LocalInstance) -> None:
    head = await here.trigger("step", ordering_key="a", run_at=datetime.now(UTC) + timedelta(seconds=1))
    next_ = await here.trigger("step", ordering_key="a")
    assert (await here.ended(next_)).state == "succeeded"
    assert (await by_line(here))["a"] == [head, next_]


async def test_a_run_that_waits_for_its_retry_is_begun_when_its_time_comes_and_the_line_after_it(
    here: LocalInstance,
) -> None:
    head = await here.trigger("step", {"failures": 1, "after": 0.5}, ordering_key="a")
    next_ = await here.trigger("step", ordering_key="a")
    assert (await here.ended(next_)).state == "succeeded"
    assert (await by_line(here))["a"] == [head, next_]
    assert (await here.look(head)).attempt == 2


async def test_a_deadline_that_another_instance_ends_lets_the_line_go_on(here: LocalInstance) -> None:
    """The end comes from elsewhere: nobody here has ended an attempt."""
    head = await here.trigger("step", ordering_key="a", run_at=datetime.now(UTC) + timedelta(hours=1))
    next_ = await here.trigger("step", ordering_key="a")
    await here.run("step", ordering_key="b")
    hangs = """
        UPDATE runs SET state = 'running', token = 1, attempt = 9, max_attempts = 1, instance_id = 0, instance = 'it',
                        deadline_at = now() - interval '1 h'
        WHERE id = %s RETURNING 1
    """
    await here.sql(hangs, head)
    database = here.running.context.database
    async with database.autocommit() as connection:
        await sweep(connection, database.namespace)
    assert (await here.look(head)).state == "failed"
    assert (await here.ended(next_)).state == "succeeded"


async def test_what_nobody_told_of_is_found(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "INTERVAL", 0.1)
    async with local_instance(address) as here:
        await here.sql(NUMBERED)
        head = await here.trigger("step", ordering_key="a", run_at=datetime.now(UTC) + timedelta(hours=1))
        next_ = await here.trigger("step", ordering_key="a")
        await here.sql("DELETE FROM runs WHERE id = %s RETURNING 1", head)
        assert (await here.ended(next_)).state == "succeeded"


async def test_a_resumed_action_goes_on_with_its_lines(here: LocalInstance) -> None:
    client = here.running.client
    (await client.post("/actions/step/pause")).raise_for_status()
    made = await here.trigger_all([Order("step", ordering_key=f"line-{number % 2}") for number in range(6)])
    await here.run("noop")
    assert {(await here.look(each)).state for each in made} == {"pending"}
    (await client.post("/actions/step/resume")).raise_for_status()
    await soon(lambda: all_ended(here))
    assert await by_line(here) == {"line-0": made[::2], "line-1": made[1::2]}


async def test_lines_of_a_limited_action_are_drained_without_anybody_looking(here: LocalInstance) -> None:
    made = await here.trigger_all(
        [Order("two-at-once", {"seconds": 0.01}, ordering_key=f"line-{number % 5}") for number in range(40)]
    )
    await soon(lambda: all_ended(here))
    for number in range(5):
        own = [await here.look(each) for each in made[number::5]]
        for first, second in pairwise(own):
            assert first.finished_at is not None
            assert second.started_at is not None
            assert first.finished_at <= second.started_at


async def test_overlap_skip_counts_runs_that_wait_in_a_line(here: LocalInstance) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    run_id = await here.trigger("alone", ordering_key="a", run_at=later)
    with pytest.raises(AlreadyActive) as refused:
        await here.trigger("alone", ordering_key="b")
    assert refused.value.run_id == run_id


async def test_a_run_that_ended_cannot_be_cancelled_out_of_its_line(here: LocalInstance) -> None:
    run = await here.run("step", ordering_key="a")
    async with here.running.context.database.connection() as connection:
        with pytest.raises(RunNotReady):
            await cancel_run(connection, NAMESPACE, run.id)


# -- over REST --------------------------------------------------------------------------------------------------------


async def test_a_request_says_the_line_and_a_run_shows_it(here: LocalInstance) -> None:
    client = here.running.client
    made = (await client.post("/actions/step/runs", json={"ordering_key": "acme"})).json()
    assert made["ordering_key"] == "acme"
    assert (await here.ended(made["id"])).ordering_key == "acme"
    assert (await client.get(f"/runs/{made['id']}")).json()["ordering_key"] == "acme"
    plain = (await client.post("/actions/step/runs")).json()
    assert plain["ordering_key"] is None
    batch = {"runs": [{"action": "step", "ordering_key": "acme"}, {"action": "step", "ordering_key": None}]}
    answer = (await client.post("/runs:batch", json=batch)).json()
    assert [run["ordering_key"] for run in answer["runs"]] == ["acme", None]


async def test_a_request_with_what_is_no_key_is_refused_by_the_fields_name(here: LocalInstance) -> None:
    client = here.running.client
    wrong: list[Any] = ["", "x" * 201, "a\nb", 7, ["a"]]
    for ordering_key in wrong:
        refused = await client.post("/actions/step/runs", json={"ordering_key": ordering_key})
        assert refused.status_code == 422
        assert [error["field"] for error in refused.json()["errors"]] == ["ordering_key"]
        refused = await client.post("/runs:batch", json={"runs": [{"action": "step", "ordering_key": ordering_key}]})
        assert refused.status_code == 422
        assert [error["field"] for error in refused.json()["errors"]] == ["runs.0.ordering_key"]
    assert await here.sql("SELECT id FROM runs") == []


async def test_a_batch_with_an_idempotency_key_keeps_the_order_of_its_lines(here: LocalInstance) -> None:
    client, headers = here.running.client, {"Idempotency-Key": "once"}
    batch = {"runs": [{"action": "step", "ordering_key": "acme"} for _ in range(30)]}
    made = [run["id"] for run in (await client.post("/runs:batch", json=batch, headers=headers)).json()["runs"]]
    assert made == sorted(made)
    again = await client.post("/runs:batch", json=batch, headers=headers)
    assert again.status_code == 200
    assert [run["id"] for run in again.json()["runs"]] == made
    await soon(lambda: all_ended(here))
    assert await by_line(here) == {"acme": made}
    batch["runs"][3]["ordering_key"] = "other"
    refused = await client.post("/runs:batch", json=batch, headers=headers)
    assert refused.json()["type"].endswith("key-reused"), "it is another request"


async def test_all_that_failed_of_a_line_is_tried_again_in_order(here: LocalInstance) -> None:
    client = here.running.client
    made = await here.trigger_all([Order("give-up", ordering_key="acme") for _ in range(5)])
    await soon(lambda: all_ended(here))
    answer = await client.post("/runs:retry", json={"action": "give-up"})
    assert answer.json() == {"retried": 5, "more": False}
    await soon(lambda: all_ended(here))
    again = [await here.look(run_id) for run_id in made]
    for first, second in pairwise(again):
        assert first.finished_at is not None
        assert second.started_at is not None
        assert first.finished_at <= second.started_at
    assert [run.ordering_key for run in again] == ["acme"] * 5
