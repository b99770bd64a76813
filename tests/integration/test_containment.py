"""Containment: what an action raises, returns or emits affects only its own attempt."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import psycopg
import pytest

from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.execute import writer
from app.fleet.errors import PayloadInvalid
from tests.support import trial_faults
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio

CONCURRENCY = 2
FAULTS = ("tests.support.trial_faults", "tests.support.trial_actions")


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address, actions=FAULTS, concurrency=CONCURRENCY) as own:
        yield own


# Whether the run waits for its second attempt within a year, or has ended.
READ_SECOND_WAIT = """
SELECT run_at < clock_timestamp() + interval '367 days' FROM runs WHERE id = %s AND error IS NOT NULL
UNION ALL
SELECT true FROM finished_runs WHERE id = %s
"""


async def all_slots_are_free(here: LocalInstance) -> None:
    await soon(lambda: here.sql("SELECT 1 WHERE %s", here.engine.executor.room == CONCURRENCY))


@pytest.mark.parametrize("name", ["misbehave", "misbehave-in-thread"])
async def test_any_fault_of_an_action_fails_only_its_run_and_frees_its_slot(here: LocalInstance, name: str) -> None:
    for how in trial_faults.WAYS:
        for run_id in await here.trigger_all([Order(name, {"how": how})] * (CONCURRENCY + 1)):
            run = await here.ended(run_id)
            assert (how, run.state) == (how, "failed")
            assert 0 < len(run.error or "") < 11_000, how
        await all_slots_are_free(here)
    assert (await here.run("echo", {"a": 1})).result == {"a": 1}


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("how", ["exit", "keyboard"])
async def test_a_task_that_an_action_started_does_not_end_the_process(
    here: LocalInstance, how: str, group: bool
) -> None:
    run = await here.run("leave", {"how": how, "group": group})
    assert run.state == "failed"
    assert ("ExceptionGroup" if group else "was raised in a task that the action started") in (run.error or "")
    assert (await here.run("echo")).state == "succeeded"
    await all_slots_are_free(here)


async def test_an_impossible_retry_delay_is_replaced_by_a_possible_one(here: LocalInstance) -> None:
    for how in (way for way in trial_faults.RAISED if way.startswith("later")):
        ((waits,),) = await soon(
            partial(here.sql, READ_SECOND_WAIT, *[await here.trigger("misbehave-twice", {"how": how})] * 2)
        )
        assert waits, how
    await all_slots_are_free(here)


BEYOND = """
INSERT INTO runs (action_id, priority, run_at, max_attempts, trigger)
SELECT id, 0, '58028-01-01 00:00+00', 1, 'code' FROM actions LIMIT 1
"""


async def test_the_table_refuses_a_run_at_beyond_the_python_calendar(here: LocalInstance) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        await here.sql(BEYOND)


async def test_a_fenced_write_through_the_handle_of_another_attempt_fails_the_run(here: LocalInstance) -> None:
    other = await here.handle(await here.trigger("nap", {"seconds": 60}))
    trial_faults.strangers[:] = [other]
    with here.without_comparison():
        await here.sql("UPDATE runs SET token = token + 1 WHERE id = %s RETURNING 1", other.id)
        run = await here.run("meddle")
    assert (run.state, run.attempt) == ("failed", 1)
    assert f"run {other.id} was taken over" in (run.error or "")


async def test_a_run_that_emits_without_end_does_not_delay_the_end_of_other_runs(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, the run would reach the limit of its events before the others end.
    monkeypatch.setattr(writer, "MAX_EVENTS", 10_000_000)
    babbling = await here.attempt(await here.trigger("babble"))
    for _ in range(3):
        run = await here.run("brief")
        assert (run.state, run.result) == ("succeeded", "said")
    assert babbling.ending is None, "the run emitted all the time"


async def test_a_run_that_emits_without_end_does_not_delay_the_pause_of_other_runs(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the time of the pause, the run would reach the limit of its events.
    monkeypatch.setattr(writer, "MAX_EVENTS", 10_000_000)
    async with local_instance(address, actions=FAULTS, concurrency=CONCURRENCY, pause_timeout=13.0) as here:
        # Half of this is left to write the ends: on a busy machine, 1 s was not enough.
        here.engine.executor._hurry = 12.0
        await here.attempt(await here.trigger("babble", {"deaf": True}))
        await here.attempt(await here.trigger("nap", {"seconds": 60}))
    with psycopg.connect(address) as left:
        rows = left.execute("SELECT state, deaths FROM flotilla.runs ORDER BY id").fetchall()
    assert rows == [("pending", 0)] * 2, "the instance itself made both runs pending, and none was rescued"


@pytest.mark.parametrize("letters", [0, 60_000])
async def test_the_unwritten_events_of_a_run_are_bounded(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch, letters: int
) -> None:
    own = here.engine.executor.writer
    genuine, gate, held = own._append_events, asyncio.Event(), asyncio.Event()

    async def wait_first(*given: Any) -> None:
        held.set()
        await gate.wait()
        await genuine(*given)

    monkeypatch.setattr(own, "_append_events", wait_first)
    attempt = await here.attempt(await here.trigger("babble", {"letters": letters}))
    await held.wait()
    # After some iterations of the event loop, all tasks that can continue have continued.
    for _ in range(100):
        await asyncio.sleep(0)
    assert attempt.unwritten_events <= writer.MAX_UNWRITTEN_EVENTS
    assert attempt.unwritten_size <= writer.MAX_UNWRITTEN_SIZE + letters + 100
    withheld = attempt.unwritten_events
    gate.set()
    # The run continues when there is room: more events are written than were withheld.
    await soon(lambda: here.sql("SELECT 1 FROM runs WHERE events > %s", 2 * withheld))


async def test_an_event_beyond_the_limit_of_a_run_fails_it_with_an_explanation(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_EVENTS", 50)
    run = await here.run("babble")
    assert run.state == "failed"
    assert f"run {run.id} has 50 events, which is the limit" in (run.error or "")


async def test_a_payload_that_could_not_be_read_again_is_refused_with_the_reason(
    here: LocalInstance,
) -> None:
    for payload, why in (
        ({"n": 10**5000}, "it has an integer of more than 4300 digits"),
        ({"n": trial_faults.nested(210)}, "it is nested more than 200 deep"),
        ({"n": "x" * 2_000_000}, "and may have 1048576"),
    ):
        with pytest.raises(PayloadInvalid, match=why):
            await here.trigger("echo", payload)


async def test_an_unreadable_value_is_replaced_in_responses_by_the_reason(here: LocalInstance) -> None:
    run = await here.run("echo", {"a": 1})
    for column, value in (("result", "[1" + "0" * 5000 + "]"), ("payload", "[" * 300 + "]" * 300)):
        await here.sql(f"UPDATE finished_runs SET {column} = %s WHERE id = %s", value, run.id)
    for path in ("/runs", f"/runs/{run.id}"):
        answer = await here.running.client.get(path)
        assert answer.status_code == 200, answer.text
    assert (await here.read(run.id)).result == "(left out: it has an integer of more than 4300 digits)"


async def test_each_failed_attempt_is_one_log_line_and_each_cause_is_logged_with_one_traceback(
    here: LocalInstance, caplog: pytest.LogCaptureFixture
) -> None:
    for run_id in await here.trigger_all([Order("misbehave", {"how": "nul"})] * 5):
        await here.ended(run_id)
    lines = [record for record in caplog.records if record.msg in {"run.retrying", "run.failed"}]
    fields = [record.fields for record in lines]  # type: ignore[attr-defined]
    assert [each["times"] for each in fields] == [1, 1, 2, 3, 4]
    assert {each["where"].rpartition(":")[0] for each in fields} == {trial_faults.__file__}
    assert {each["reason"] for each in fields} == {"ValueError: a\\x00b"}
    assert [record.exc_info is not None for record in lines] == [True, False, False, False, False]
    assert {(record.msg, record.levelname) for record in lines} == {("run.failed", "ERROR")}


async def test_the_log_says_whether_and_when_a_run_is_tried_again(
    here: LocalInstance, caplog: pytest.LogCaptureFixture
) -> None:
    await here.run("fail")
    await here.run("give-up")
    lines = [record for record in caplog.records if record.msg in {"run.retrying", "run.failed"}]
    fields = [record.fields for record in lines]  # type: ignore[attr-defined]
    assert [
        (line.msg, each["attempt"], each.get("retry_in_seconds")) for line, each in zip(lines, fields, strict=True)
    ] == [
        ("run.retrying", 1, 0.1),
        ("run.retrying", 2, 0.1),
        ("run.failed", 3, None),
        ("run.failed", 1, None),
    ]
    assert "where" in fields[2]
    assert fields[3]["reason"] == "gave up: there is no such parcel"
    assert "where" not in fields[3], "GiveUp is what the action means to do"


WAYS_TO_WRITE = {
    "ends": ("nap", {"seconds": 0.3}, "succeeded"),
    "fails": ("fall", {"seconds": 0.3}, "failed"),
    "emits": ("chatter", {"count": 5, "pause": 0.1}, "succeeded"),
    "takes-checkpoints": ("walk", {"steps": 3}, "succeeded"),
}


@pytest.mark.parametrize("lock", ["UPDATE", "KEY SHARE"])
@pytest.mark.parametrize("how", WAYS_TO_WRITE)
async def test_a_transaction_that_locks_the_row_of_a_run_delays_only_that_run(
    here: LocalInstance, address: str, how: str, lock: str
) -> None:
    name, payload, state = WAYS_TO_WRITE[how]
    attempt = await here.attempt(await here.trigger(name, payload))
    async with await psycopg.AsyncConnection.connect(address) as holder:
        await holder.execute(f"SELECT FROM flotilla.runs WHERE id = {attempt.run_id} FOR {lock}")
        if how in {"ends", "fails"}:
            await soon(lambda: here.sql("SELECT 1 WHERE %s", attempt.recorded))
        for _ in range(2):
            other = await here.run("walk", {"steps": 3, "seconds": 0.05})
            assert (other.state, other.attempt) == ("succeeded", 1)
        await holder.rollback()
    run = await here.ended(attempt.run_id)
    assert run.state == state
    assert not here.engine.executor.writer.fenced, "no write was fenced"
    events = "SELECT seq FROM run_events WHERE run_id = %s AND kind <> 'state' ORDER BY seq"
    written = await here.sql(events, attempt.run_id)
    assert [seq for (seq,) in written] == list(range(3, 3 + len(written)))
    await all_slots_are_free(here)
