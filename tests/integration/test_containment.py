"""Nothing that an action raises, returns or emits gets further than its own attempt."""

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


# It waits for its second attempt, or has had it.
WAITS = """
SELECT run_at < clock_timestamp() + interval '367 days' FROM runs WHERE id = %s AND error IS NOT NULL
UNION ALL
SELECT true FROM finished_runs WHERE id = %s
"""


async def all_slots_are_free(here: LocalInstance) -> None:
    await soon(lambda: here.sql("SELECT 1 WHERE %s", here.engine.executor.room == CONCURRENCY))


@pytest.mark.parametrize("name", ["misbehave", "misbehave-in-thread"])
async def test_whatever_it_does_its_run_fails_and_its_slot_comes_back(here: LocalInstance, name: str) -> None:
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


async def test_a_wait_that_cannot_be_is_replaced_by_one_that_can(here: LocalInstance) -> None:
    for how in (way for way in trial_faults.RAISED if way.startswith("later")):
        ((waits,),) = await soon(partial(here.sql, WAITS, *[await here.trigger("misbehave-twice", {"how": how})] * 2))
        assert waits, how
    await all_slots_are_free(here)


BEYOND = """
INSERT INTO runs (action_id, priority, run_at, max_attempts, trigger)
SELECT id, 0, '58028-01-01 00:00+00', 1, 'code' FROM actions LIMIT 1
"""


async def test_no_run_can_wait_beyond_the_calendar(here: LocalInstance) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        await here.sql(BEYOND)


async def test_a_write_of_another_attempt_that_is_refused_is_an_ordinary_failure(here: LocalInstance) -> None:
    other = await here.handle(await here.trigger("nap", {"seconds": 60}))
    trial_faults.strangers[:] = [other]
    with here.unwatched():
        await here.sql("UPDATE runs SET token = token + 1 WHERE id = %s RETURNING 1", other.id)
        run = await here.run("meddle")
    assert (run.state, run.attempt) == ("failed", 1)
    assert f"run {other.id} was taken over" in (run.error or "")


async def test_a_run_that_emits_without_end_withholds_nobody_elses_end(here: LocalInstance) -> None:
    babbling = await here.attempt(await here.trigger("babble"))
    for _ in range(3):
        run = await here.run("brief")
        assert (run.state, run.result) == ("succeeded", "said")
    assert babbling.ending is None, "it went on all the time"


async def test_a_run_that_emits_without_end_withholds_nobody_elses_pause(address: str) -> None:
    async with local_instance(address, actions=FAULTS, concurrency=CONCURRENCY, pause_timeout=2.0) as here:
        await here.attempt(await here.trigger("babble", {"deaf": True}))
        await here.attempt(await here.trigger("nap", {"seconds": 60}))
    with psycopg.connect(address) as left:
        rows = left.execute("SELECT state, deaths FROM flotilla.runs ORDER BY id").fetchall()
    assert rows == [("pending", 0)] * 2, "both were given back, and the instance's death found nothing"


@pytest.mark.parametrize("letters", [0, 60_000])
async def test_what_a_run_has_emitted_and_is_not_written_yet_is_bounded(
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
    # Everything that is ready to go on has gone on when the loop has gone round a few times.
    for _ in range(100):
        await asyncio.sleep(0)
    assert attempt.unwritten_events <= writer.MAX_UNWRITTEN_EVENTS
    assert attempt.unwritten_size <= writer.MAX_UNWRITTEN_SIZE + letters + 100
    held_back = attempt.unwritten_events
    gate.set()
    # It goes on when there is room: more is written than was held back.
    await soon(lambda: here.sql("SELECT 1 FROM runs WHERE events > %s", 2 * held_back))


async def test_an_event_beyond_the_most_a_run_may_have_is_refused_with_a_text_for_its_author(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_EVENTS", 50)
    run = await here.run("babble")
    assert run.state == "failed"
    assert f"run {run.id} has 50 events, which is the limit" in (run.error or "")


async def test_a_payload_that_no_reader_could_read_is_refused_with_the_field_and_the_reason(
    here: LocalInstance,
) -> None:
    for payload, why in (
        ({"n": 10**5000}, "it has an integer of more than 4300 digits"),
        ({"n": trial_faults.nested(210)}, "it is nested more than 200 deep"),
        ({"n": "x" * 2_000_000}, "and may have 1048576"),
    ):
        with pytest.raises(PayloadInvalid, match=why):
            await here.trigger("echo", payload)


async def test_a_row_that_no_reader_could_read_is_left_out_of_its_page(here: LocalInstance) -> None:
    run = await here.run("echo", {"a": 1})
    for column, value in (("result", "[1" + "0" * 5000 + "]"), ("payload", "[" * 300 + "]" * 300)):
        await here.sql(f"UPDATE finished_runs SET {column} = %s WHERE id = %s", value, run.id)
    for path in ("/runs", f"/runs/{run.id}"):
        answer = await here.running.client.get(path)
        assert answer.status_code == 200, answer.text
    assert (await here.look(run.id)).result == "(left out: it has an integer of more than 4300 digits)"


async def test_each_failed_attempt_is_a_line_and_a_cause_has_one_traceback(
    here: LocalInstance, caplog: pytest.LogCaptureFixture
) -> None:
    for run_id in await here.trigger_all([Order("misbehave", {"how": "nul"})] * 5):
        await here.ended(run_id)
    lines = [record for record in caplog.records if record.msg == "run.raised"]
    fields = [record.fields for record in lines]  # type: ignore[attr-defined]
    assert [each["times"] for each in fields] == [1, 1, 2, 3, 4]
    assert {each["where"].rpartition(":")[0] for each in fields} == {trial_faults.__file__}
    assert {each["reason"] for each in fields} == {"ValueError: a\\x00b"}
    assert [record.exc_info is not None for record in lines] == [True, False, False, False, False]


WAYS_TO_WRITE = {
    "ends": ("nap", {"seconds": 0.3}, "succeeded"),
    "fails": ("fall", {"seconds": 0.3}, "failed"),
    "emits": ("chatter", {"count": 5, "pause": 0.1}, "succeeded"),
    "takes-checkpoints": ("walk", {"steps": 3}, "succeeded"),
}


@pytest.mark.parametrize("lock", ["UPDATE", "KEY SHARE"])
@pytest.mark.parametrize("how", WAYS_TO_WRITE)
async def test_a_transaction_that_holds_the_row_of_a_run_delays_that_run_alone(
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
    assert not here.engine.executor.writer.fenced, "no write was taken for one of an old token"
    events = "SELECT seq FROM run_events WHERE run_id = %s AND kind <> 'state' ORDER BY seq"
    said = await here.sql(events, attempt.run_id)
    assert [seq for (seq,) in said] == list(range(3, 3 + len(said)))
    await all_slots_are_free(here)
