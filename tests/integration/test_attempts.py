"""The end of an attempt is stored in its run, and does not affect other runs."""

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import assert_type

import pytest
from sqlalchemy import text

from app.fleet import Action, PayloadInvalid, trigger
from app.fleet.engine.actions.creator import current
from app.fleet.engine.enqueue.orders import Order
from app.fleet.errors import EngineError
from tests.support.runs import LocalInstance, local_instance, soon
from tests.support.trial_actions import EFFECTS, Parcel, noop, weigh

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address, pause_timeout=4.0) as own:
        yield own


async def test_a_run_succeeds_with_the_return_value_of_its_action(here: LocalInstance) -> None:
    run = await here.run("echo", {"a": [1, "ü", None]})
    assert (run.state, run.result, run.attempt, run.error) == ("succeeded", {"a": [1, "ü", None]}, 1, None)
    assert run.instance == "flotilla-1"
    assert run.created_at <= run.started_at <= run.finished_at  # type: ignore[operator]


async def test_a_plain_function_runs_in_a_thread(here: LocalInstance) -> None:
    assert (await here.run("weigh-in-thread", {"weight": 7})).result == 7


async def test_a_typed_payload_arrives_as_its_type(here: LocalInstance) -> None:
    assert (await here.run("weigh", {"weight": "12"})).result == 12


async def test_a_run_is_retried_and_then_fails_with_its_last_error(here: LocalInstance) -> None:
    run = await here.run("fail")
    assert (run.state, run.attempt, run.max_attempts) == ("failed", 3, 3)
    assert run.error == "ValueError: the parcel\\x00is torn"


async def test_an_attempt_that_raises_try_again_is_retried(here: LocalInstance) -> None:
    run = await here.run("fail-once")
    assert (run.state, run.result) == ("succeeded", 2)


async def test_an_attempt_that_raises_give_up_is_not_retried(here: LocalInstance) -> None:
    run = await here.run("give-up")
    assert (run.state, run.attempt, run.error) == ("failed", 1, "gave up: there is no such parcel")


async def test_a_result_that_is_not_json_fails_the_run_with_an_explanation(here: LocalInstance) -> None:
    run = await here.run("not-json")
    assert (run.state, run.attempt) == ("failed", 1)
    assert "what it returned cannot be stored as JSON" in (run.error or "")


async def test_system_exit_ends_the_run_and_not_the_process(here: LocalInstance) -> None:
    run = await here.run("quit")
    assert (run.state, run.error) == ("failed", "SystemExit: 3")


async def test_an_attempt_beyond_its_deadline_is_cancelled(here: LocalInstance) -> None:
    run = await here.run("hang")
    assert (run.state, run.error) == ("failed", "exceeded its deadline of 0.3 s")


@pytest.mark.parametrize("name", ["deaf", "deaf-thread"])
async def test_an_attempt_that_ignores_its_cancellation_is_abandoned(here: LocalInstance, name: str) -> None:
    run = await here.run(name)
    assert run.error == "exceeded its deadline of 0.3 s; it ignored its cancellation"
    assert here.engine.executor.abandoned == 1
    assert (await here.run("echo")).state == "succeeded"


async def test_an_attempt_that_blocks_the_event_loop_beyond_its_deadline_fails_with_an_explanation(
    here: LocalInstance,
) -> None:
    assert (await here.run("block", {"seconds": 0.2})).state == "succeeded"
    run = await here.run("block", {"seconds": 6.5})
    assert run.state == "failed"
    assert re.fullmatch(r"exceeded its deadline of 5 s; it blocked the event loop for \d+ s", run.error or "")


async def test_a_running_run_is_cancelled_on_request(here: LocalInstance) -> None:
    from app.fleet.runs.cancel import cancel_run

    run_id = await here.trigger("nap", {"seconds": 60})
    await here.until(run_id, "running")
    database = here.running.context.database
    async with database.connection() as connection:
        await cancel_run(connection, database.namespace, run_id)
    run = await here.ended(run_id)
    assert (run.state, run.error) == ("cancelled", "cancelled on request")


async def test_a_cancellation_is_noticed_even_if_its_notification_is_lost(here: LocalInstance) -> None:
    run_id = await here.trigger("nap", {"seconds": 60})
    await here.until(run_id, "running")
    await here.sql("UPDATE runs SET cancel_requested_at = now() WHERE id = %s", run_id)
    assert (await here.ended(run_id)).state == "cancelled"


async def test_a_pending_run_with_a_cancellation_request_ends_cancelled_and_does_not_start(here: LocalInstance) -> None:
    run_id = await here.trigger("echo", run_at=None)
    await here.ended(run_id)
    later = await here.trigger("nap", {"seconds": 60})
    await here.until(later, "running")
    await here.sql(
        "UPDATE runs SET state = 'pending', cancel_requested_at = now(), attempt = 0 WHERE id = %s RETURNING 1", later
    )
    run = await here.ended(later)
    assert (run.state, run.error) == ("cancelled", "cancelled on request, while it waited")


async def test_a_run_that_fails_before_its_cancellation_arrives_ends_cancelled(
    here: LocalInstance, tmp_path: Path
) -> None:
    """Otherwise the run would be pending for the hour until its retry, and then end without another attempt."""
    await here.sql(EFFECTS)
    gate = tmp_path / "gate"
    with here.without_comparison():
        run_id = await here.trigger("step", {"gate": str(gate), "failures": 1, "after": 3600})
        await here.attempt(run_id)
        await here.sql("UPDATE runs SET cancel_requested_at = now() WHERE id = %s", run_id)
        gate.touch()
        run = await here.until(run_id, "cancelled", "pending")
    assert (run.state, run.error) == ("cancelled", "cancelled on request; not yet")
    await here.engine.executor.writer.empty()
    assert here.engine.metrics.outcomes == {"cancelled": 1}
    assert not here.engine.executor.writer.fenced


async def test_effects_and_completion_commit_together(here: LocalInstance) -> None:
    await here.sql(EFFECTS)
    for name in ("note", "note-in-thread"):
        run = await here.run(name)
        assert (run.state, run.attempt) == ("succeeded", 1)
        assert await here.sql("SELECT count(*) FROM effects WHERE run_id = %s", run.id) == [(1,)]
    assert await here.sql("SELECT seq, kind FROM run_events") == [(3, "noting")], (
        "the event was emitted before the end, so it is stored"
    )
    assert not here.engine.executor.writer.fenced


async def test_a_commit_inside_the_block_of_run_commit_is_refused_and_keeps_no_effect(here: LocalInstance) -> None:
    await here.sql(EFFECTS)
    run_id = await here.trigger("nap", {"seconds": 60})
    run, write = await here.handle(run_id), text("INSERT INTO public.effects (run_id) VALUES (:run_id)")
    with pytest.raises(EngineError, match="do not commit its session inside"):
        async with run.commit() as session:
            await session.execute(write, {"run_id": run_id})
            await session.commit()
    assert await here.sql("SELECT run_id FROM effects") == []
    assert (await here.read(run_id)).state == "running"
    async with run.commit() as session, session.begin_nested():
        await session.execute(write, {"run_id": run_id})
    assert await here.sql("SELECT run_id FROM effects") == [(run_id,)]
    assert (await here.read(run_id)).state == "succeeded"


async def test_effects_are_rolled_back_if_the_completion_is_fenced(here: LocalInstance, tmp_path: Path) -> None:
    await here.sql(EFFECTS)
    gate = tmp_path / "gate"
    run_id = await here.trigger("note", {"gate": str(gate)})
    # The attempt has emitted its event, and is about to commit.
    await soon(lambda: here.sql("SELECT 1 FROM run_events WHERE run_id = %s", run_id))
    with here.without_comparison():
        # As if another instance had claimed the run: the token has changed.
        await here.sql("UPDATE runs SET token = token + 1 WHERE id = %s RETURNING 1", run_id)
        gate.touch()
        await soon(lambda: here.sql("SELECT 1 WHERE %s", here.engine.executor.writer.fenced["commit"] == 1))
    assert await here.sql("SELECT * FROM effects") == []


async def test_progress_events_are_stored_in_order(here: LocalInstance) -> None:
    run = await here.run("walk", {"steps": 5, "seconds": 0.01})
    assert run.progress == {"done": 1.0, "text": None}
    events = await here.sql("SELECT seq, kind, data->>'done' FROM run_events WHERE run_id = %s ORDER BY seq", run.id)
    assert events == [(2 + number, "progress", f"{number / 5}") for number in range(1, 6)]


async def test_an_attempt_that_stops_at_a_checkpoint_sees_that_checkpoint(here: LocalInstance) -> None:
    """An action may handle the cancellation, and must not read an older checkpoint than the database has."""
    run = await here.handle(await here.trigger("nap", {"seconds": 60}))
    here.engine.executor.writer.stopping.set()
    with pytest.raises(asyncio.CancelledError):
        await run.checkpoint({"step": 1})
    assert run.last_checkpoint == {"step": 1}
    assert await here.sql("SELECT checkpoint FROM runs WHERE id = %s", run.id) == [({"step": 1},)]


async def test_an_action_triggers_another(here: LocalInstance) -> None:
    run = await here.run("relay", {"x": 1})
    assert (await here.ended(run.result)).result == {"x": 1}


async def test_a_run_triggered_in_a_session_exists_exactly_if_the_session_commits(here: LocalInstance) -> None:
    current.set(here.engine.triggers)
    database = here.running.context.database
    lost = 0

    async def fail_after_trigger() -> None:
        nonlocal lost
        async with database.session() as session:
            lost = await trigger("echo", session=session)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_after_trigger()
    async with database.session() as session:
        kept = await trigger("echo", {"n": 1}, session=session)
        assert await here.sql("SELECT 1 FROM runs WHERE id = %s", kept) == []
    assert (await here.ended(kept)).state == "succeeded"
    assert await here.sql("SELECT 1 FROM runs WHERE id = %s", lost) == []
    assert await here.sql("SELECT 1 FROM finished_runs WHERE id = %s", lost) == []


async def test_the_trigger_of_an_action_makes_the_run_that_trigger_makes_of_its_name(here: LocalInstance) -> None:
    current.set(here.engine.triggers)
    given, later = Parcel(weight=3), datetime.now(UTC) + timedelta(hours=1)
    async with here.running.context.database.session() as session:
        run_id = await weigh.trigger(given, key="a", run_at=later, priority=7, ordering_key="line", session=session)
        assert await here.sql("SELECT 1 FROM runs WHERE id = %s", run_id) == [], "before its transaction commits"
    ids = {run_id}
    ids.add(await trigger("weigh", given, key="b", run_at=later, priority=7, ordering_key="line"))
    ids.add(await trigger(weigh, given, key="c", run_at=later, priority=7, ordering_key="line"))
    assert len(ids) == 3
    columns = "action_id, trigger, payload::text, run_at, priority, ordering_key"
    assert len(await here.sql(f"SELECT DISTINCT {columns} FROM runs WHERE id = ANY (%s)", list(ids))) == 1
    assert await weigh.trigger(given, key="a") == run_id
    plain = await weigh.trigger(given)
    assert (await here.ended(plain)).result == 3


async def test_the_trigger_of_an_action_takes_a_payload_of_its_type_and_mypy_no_other(here: LocalInstance) -> None:
    """An `ignore` that nothing needs is an error of mypy."""
    current.set(here.engine.triggers)
    assert_type(weigh, Action[Parcel])
    assert await weigh.trigger({"weight": 3})  # type: ignore[arg-type]
    with pytest.raises(PayloadInvalid):
        await weigh.trigger("heavy")  # type: ignore[arg-type]
    assert await noop.trigger({"any": ["object"]})
    with pytest.raises(PayloadInvalid):
        await noop.trigger([1])  # type: ignore[arg-type]


async def test_thousands_of_runs_all_end_and_free_their_slots(here: LocalInstance) -> None:
    ids = await here.trigger_all([Order("noop")] * 3000)
    assert len(set(ids)) == 3000
    await soon(lambda: here.sql("SELECT 1 WHERE (SELECT count(*) FROM finished_runs) = 3000"))
    # The executor receives the response a moment after the commit.
    await soon(lambda: all_slots_free(here))
    assert await here.sql("SELECT count(*) FROM runs") == [(0,)]


async def all_slots_free(here: LocalInstance) -> bool:
    return here.engine.executor.room == 100


async def test_a_result_that_postgresql_refuses_fails_only_its_run(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of results by the executor is bypassed for this test."""
    from app.fleet.engine.actions.run import as_json as genuine
    from app.fleet.engine.execute import executor

    def without_check(value: object, what: str, limit: int) -> str:
        return "{no json" if value == {"poison": True} else genuine(value, what, limit)

    monkeypatch.setattr(executor, "as_json", without_check)
    here.running.context.lifecycle.draining.set()
    ids = await here.trigger_all([Order("echo", {"poison": n == 7}) for n in range(20)])
    here.running.context.lifecycle.draining.clear()
    here.engine.dispatcher.wake()
    ended = [await here.ended(run_id) for run_id in ids]
    assert [run.state for run in ended] == ["failed" if n == 7 else "succeeded" for n in range(20)]
    assert "PostgreSQL refused what it wrote" in (ended[7].error or "")
    await soon(lambda: all_slots_free(here))


async def test_log_lines_of_an_attempt_have_the_ids_of_its_run_and_of_the_request_that_triggered_it(
    address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with local_instance(address) as here:
        answer = await here.running.client.post("/actions/talk/runs", headers={"x-request-id": "order-1"})
        run = await here.ended(answer.json()["id"])
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "the parcel is heavy" in line]
    assert f"request_id=order-1 run={run.id}" in line
