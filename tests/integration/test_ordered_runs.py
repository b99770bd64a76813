"""Ordered runs in a service: what starts the next run of a key, with the reconciler switched off; and over REST."""

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


async def completed_by_key(here: LocalInstance) -> dict[str, list[int]]:
    return runs_by_key(await here.sql(READ_EFFECTS))


async def all_ended(here: LocalInstance) -> bool:
    return await here.sql("SELECT count(*) FROM runs") == [(0,)]


@pytest.fixture
async def here(address: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalInstance]:
    """A service whose reconciler reads once, at its start, and not again."""
    monkeypatch.setattr(reconciler, "INTERVAL", 3600.0)
    async with local_instance(address) as own:
        # The reconciler reads once at the start.
        await soon(lambda: reconciler_has_read(own))
        await own.sql(NUMBERED)
        yield own


async def reconciler_has_read(here: LocalInstance) -> bool:
    return here.engine.reconciler.reads > 0


async def test_two_hundred_runs_of_five_keys_keep_their_order_through_failures(here: LocalInstance) -> None:
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
    ended = await completed_by_key(here)
    for key in {order.ordering_key for order in orders}:
        expected = [run_id for run_id, order in zip(made, orders, strict=True) if order.ordering_key == key]
        assert ended[str(key)] == expected
    assert {(await here.read(run_id)).state for run_id in plain} == {"succeeded"}


async def test_the_next_run_of_a_key_starts_when_its_head_has_failed(here: LocalInstance) -> None:
    failed = await here.trigger("give-up", ordering_key="a")
    next_ = await here.trigger("give-up", ordering_key="a")
    assert [(await here.ended(each)).state for each in (failed, next_)] == ["failed", "failed"]
    first, second = [await here.read(each) for each in (failed, next_)]
    assert first.finished_at is not None
    assert second.started_at is not None
    assert second.started_at >= first.finished_at


async def test_the_next_run_of_a_key_starts_when_its_pending_head_is_cancelled(here: LocalInstance) -> None:
    head = await here.trigger("step", ordering_key="a", run_at=datetime.now(UTC) + timedelta(hours=1))
    next_ = await here.trigger("step", ordering_key="a")
    other = await here.run("step", ordering_key="b")
    assert other.state == "succeeded"
    assert (await here.read(next_)).state == "pending"
    (await here.running.client.post(f"/runs/{head}/cancel")).raise_for_status()
    assert (await here.ended(next_)).state == "succeeded"


async def test_the_next_run_of_a_key_starts_when_its_running_head_is_cancelled(here: LocalInstance) -> None:
    head = await here.trigger("step", {"seconds": 3600}, ordering_key="a")
    next_ = await here.trigger("step", ordering_key="a")
    await here.attempt(head)
    (await here.running.client.post(f"/runs/{head}/cancel")).raise_for_status()
    assert (await here.ended(head)).state == "cancelled"
    assert (await here.ended(next_)).state == "succeeded"


async def test_a_head_that_is_made_due_starts_and_the_next_run_after_it(here: LocalInstance) -> None:
    head = await here.trigger("step", ordering_key="a", run_at=datetime.now(UTC) + timedelta(hours=1))
    next_ = await here.trigger("step", ordering_key="a")
    (await here.running.client.post(f"/runs/{head}/retry")).raise_for_status()
    assert (await here.ended(next_)).state == "succeeded"
    assert (await completed_by_key(here))["a"] == [head, next_]


async def test_a_head_starts_at_its_run_at_and_the_next_run_after_it(here: LocalInstance) -> None:
    head = await here.trigger("step", ordering_key="a", run_at=datetime.now(UTC) + timedelta(seconds=1))
    next_ = await here.trigger("step", ordering_key="a")
    assert (await here.ended(next_)).state == "succeeded"
    assert (await completed_by_key(here))["a"] == [head, next_]


async def test_a_head_is_retried_after_its_delay_and_the_next_run_starts_after_it(
    here: LocalInstance,
) -> None:
    head = await here.trigger("step", {"failures": 1, "after": 0.5}, ordering_key="a")
    next_ = await here.trigger("step", ordering_key="a")
    assert (await here.ended(next_)).state == "succeeded"
    assert (await completed_by_key(here))["a"] == [head, next_]
    assert (await here.read(head)).attempt == 2


async def test_the_next_run_starts_when_the_rescuer_has_failed_a_hanging_head(here: LocalInstance) -> None:
    """The rescuer ends the head, as on another instance: no attempt of this instance has ended."""
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
    assert (await here.read(head)).state == "failed"
    assert (await here.ended(next_)).state == "succeeded"


async def test_the_reconciler_finds_the_next_run_if_no_notification_was_sent(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "INTERVAL", 0.1)
    async with local_instance(address) as here:
        await here.sql(NUMBERED)
        head = await here.trigger("step", ordering_key="a", run_at=datetime.now(UTC) + timedelta(hours=1))
        next_ = await here.trigger("step", ordering_key="a")
        await here.sql("DELETE FROM runs WHERE id = %s RETURNING 1", head)
        assert (await here.ended(next_)).state == "succeeded"


async def test_a_resumed_action_starts_its_ordered_runs_in_order(here: LocalInstance) -> None:
    client = here.running.client
    (await client.post("/actions/step/pause")).raise_for_status()
    made = await here.trigger_all([Order("step", ordering_key=f"line-{number % 2}") for number in range(6)])
    await here.run("noop")
    assert {(await here.read(each)).state for each in made} == {"pending"}
    (await client.post("/actions/step/resume")).raise_for_status()
    await soon(lambda: all_ended(here))
    assert await completed_by_key(here) == {"line-0": made[::2], "line-1": made[1::2]}


async def test_ordered_runs_of_a_limited_action_all_start_without_the_reconciler(here: LocalInstance) -> None:
    made = await here.trigger_all(
        [Order("two-at-once", {"seconds": 0.01}, ordering_key=f"line-{number % 5}") for number in range(40)]
    )
    await soon(lambda: all_ended(here))
    for number in range(5):
        own = [await here.read(each) for each in made[number::5]]
        for first, second in pairwise(own):
            assert first.finished_at is not None
            assert second.started_at is not None
            assert first.finished_at <= second.started_at


async def test_overlap_skip_counts_a_pending_ordered_run_as_active(here: LocalInstance) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    run_id = await here.trigger("alone", ordering_key="a", run_at=later)
    with pytest.raises(AlreadyActive) as refused:
        await here.trigger("alone", ordering_key="b")
    assert refused.value.run_id == run_id


async def test_an_ordered_run_that_has_ended_cannot_be_cancelled(here: LocalInstance) -> None:
    run = await here.run("step", ordering_key="a")
    async with here.running.context.database.connection() as connection:
        with pytest.raises(RunNotReady):
            await cancel_run(connection, NAMESPACE, run.id)


# -- over REST --------------------------------------------------------------------------------------------------------


async def test_a_request_sets_the_ordering_key_and_responses_show_it(here: LocalInstance) -> None:
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


async def test_a_request_with_an_invalid_ordering_key_is_refused_and_names_the_field(here: LocalInstance) -> None:
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


async def test_a_batch_with_an_idempotency_key_keeps_the_order_of_its_ordered_runs(here: LocalInstance) -> None:
    client, headers = here.running.client, {"Idempotency-Key": "once"}
    batch = {"runs": [{"action": "step", "ordering_key": "acme"} for _ in range(30)]}
    made = [run["id"] for run in (await client.post("/runs:batch", json=batch, headers=headers)).json()["runs"]]
    assert made == sorted(made)
    again = await client.post("/runs:batch", json=batch, headers=headers)
    assert again.status_code == 200
    assert [run["id"] for run in again.json()["runs"]] == made
    await soon(lambda: all_ended(here))
    assert await completed_by_key(here) == {"acme": made}
    batch["runs"][3]["ordering_key"] = "other"
    refused = await client.post("/runs:batch", json=batch, headers=headers)
    assert refused.json()["type"].endswith("key-reused"), "the second request differs"


async def test_failed_runs_of_a_key_are_retried_in_order(here: LocalInstance) -> None:
    client = here.running.client
    made = await here.trigger_all([Order("give-up", ordering_key="acme") for _ in range(5)])
    await soon(lambda: all_ended(here))
    answer = await client.post("/runs:retry", json={"action": "give-up"})
    assert answer.json() == {"retried": 5, "more": False}
    await soon(lambda: all_ended(here))
    again = [await here.read(run_id) for run_id in made]
    for first, second in pairwise(again):
        assert first.finished_at is not None
        assert second.started_at is not None
        assert first.finished_at <= second.started_at
    assert [run.ordering_key for run in again] == ["acme"] * 5
