"""The testing kit of `app.fleet.testing`: attempts in line, time that moves, and deaths at every point."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi import HTTPException
from sqlalchemy import text

from app.fleet import AlreadyActive, InSession, PayloadInvalid, trigger
from app.fleet.errors import EngineError
from app.fleet.testing import Instance, StoredRun, dies_at, overtaken_at
from app.fleet.testing.fixtures import databases, instance, instance_resources
from tests.support import kit_actions
from tests.support.kit_actions import Voyage, done

__all__ = ["databases", "instance", "instance_resources"]

SAIL_POINTS = [
    "start 1",
    *(f"{name} {number}" for number in (1, 2, 3) for name in ("event", "leg", "checkpoint", "checkpointed")),
    "commit 1",
    "committed 1",
    "return 1",
]


@pytest.fixture
def instance_settings() -> dict[str, Any]:
    return {"actions": ("tests.support.kit_actions",)}


@pytest.fixture(autouse=True)
async def table(instance: Instance) -> None:
    async with instance.transaction() as session:
        await session.execute(text("CREATE TABLE effects (run bigint, what text)"))
    done.clear()


async def effects(instance: Instance, run: StoredRun | None = None) -> list[str]:
    async with instance.transaction() as session:
        found = await session.execute(text("SELECT run, what FROM effects ORDER BY ctid"))
        return [what for number, what in found if run is None or number == run.id]


# -- runs in line -----------------------------------------------------------------------------------------------------


async def test_a_run_is_executed_to_its_end_with_its_result_and_events(instance: Instance) -> None:
    run = await instance.run(kit_actions.sail, Voyage(to="Turku", legs=2))
    assert (run.state, run.result, run.attempt, run.last_checkpoint) == ("succeeded", {"to": "Turku"}, 1, 2)
    assert [event.kind for event in run.events] == ["state", "state", "progress", "progress", "state"]
    assert await effects(instance) == ["Turku"]


async def test_a_plain_function_is_executed_in_its_thread(instance: Instance) -> None:
    run = await instance.run(kit_actions.moor)
    assert (run.state, run.result, run.last_checkpoint) == ("succeeded", None, "at the quay")
    assert await effects(instance) == ["Turku"]


async def test_a_run_that_fails_is_attempted_as_often_as_it_may_be_without_waiting(instance: Instance) -> None:
    run = await instance.run(kit_actions.fail)
    assert (run.state, run.attempt, run.error) == ("failed", 2, "ConnectionError: the strait is closed")
    given_up = await instance.run("give-up")
    assert (given_up.state, given_up.attempt) == ("failed", 1)


async def test_nothing_is_executed_unless_the_test_says_so(instance: Instance) -> None:
    run = await instance.trigger(kit_actions.sail, Voyage())
    posted = await instance.client.post("/actions/moor/runs", json={"payload": {"to": "Oslo"}})
    assert posted.status_code == 202
    assert [each.state for each in await instance.runs_triggered()] == ["pending", "pending"]
    executed = await instance.run_due()
    assert {each.id for each in executed} == {run.id, posted.json()["id"]}
    assert {each.state for each in executed} == {"succeeded"}


async def test_a_run_is_executed_although_others_were_triggered_before_it(instance: Instance) -> None:
    """The two runs were triggered in one transaction, so they are due at the same time."""
    await instance.run("fleet-order")
    first, second = await instance.runs_triggered("moor")
    assert (await instance.execute(second.id)).state == "succeeded"
    assert (await instance.read(first.id)).state == "pending"


async def test_runs_that_the_code_triggers_are_found_by_action_and_payload(instance: Instance) -> None:
    await instance.run("fleet-order")
    assert [run.payload["to"] for run in await instance.runs_triggered("moor")] == ["Riga", "Gdynia"]
    assert len(await instance.runs_triggered("moor", {"to": "Riga"})) == 1
    assert len(await instance.runs_triggered(kit_actions.moor, Voyage(to="Riga"))) == 1
    assert await instance.runs_triggered(kit_actions.moor, Voyage(to="Riga", legs=4)) == []
    assert await instance.runs_triggered(kit_actions.fail) == []


async def test_the_functions_of_the_fleet_mean_this_instance_in_the_test_itself(instance: Instance) -> None:
    run_id = await trigger("sail", {"to": "Visby"})
    assert (await instance.read(run_id)).payload["to"] == "Visby"
    with pytest.raises(PayloadInvalid):
        await trigger("sail", {"legs": "many"})


async def test_a_route_that_triggers_in_its_transaction_triggers_all_or_nothing(instance: Instance) -> None:
    @instance.app.post("/voyages")
    async def order_voyage(voyage: Voyage, session: InSession) -> dict[str, int]:
        run_id = await kit_actions.sail.trigger(voyage, session=session)
        if voyage.legs > 9:
            raise HTTPException(409, "too far")
        return {"run": run_id}

    assert (await instance.client.post("/voyages", json={"to": "Oslo"})).status_code == 200
    assert (await instance.client.post("/voyages", json={"to": "Sydney", "legs": 10})).status_code == 409
    assert [run.payload["to"] for run in await instance.runs_triggered(kit_actions.sail)] == ["Oslo"]
    assert [run.result for run in await instance.run_due()] == [{"to": "Oslo"}]


@pytest.mark.parametrize("number", [1, 2])
async def test_a_test_does_not_see_the_runs_of_another_test(instance: Instance, number: int) -> None:
    assert await instance.runs_triggered() == []
    run = await instance.run(kit_actions.sail, Voyage(legs=number))
    assert run.id == 1


async def test_an_ordered_run_waits_for_the_run_before_it(instance: Instance) -> None:
    first = await instance.trigger(kit_actions.sail, Voyage(), ordering_key="Turku")
    second = await instance.trigger(kit_actions.sail, Voyage(), ordering_key="Turku")
    with pytest.raises(EngineError, match=f"run {first.id} has the same ordering key"):
        await instance.attempt(second.id)
    assert [run.id for run in await instance.run_due()] == [first.id, second.id]


async def test_a_run_that_cannot_be_executed_says_why(instance: Instance) -> None:
    run = await instance.run(kit_actions.sail, Voyage(legs=0))
    with pytest.raises(EngineError, match="it is succeeded"):
        await instance.attempt(run.id)
    await instance.client.post("/actions/sail/pause")
    waiting = await instance.trigger(kit_actions.sail, Voyage())
    with pytest.raises(EngineError, match="'sail' is paused"):
        await instance.execute(waiting.id)


async def test_runs_that_trigger_runs_without_end_are_an_error(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.testing.instance.MAX_ATTEMPTS", 3)
    await instance.trigger("again")
    with pytest.raises(EngineError, match="more than 3 attempts were due"):
        await instance.run_due()


# -- time -------------------------------------------------------------------------------------------------------------


async def test_the_delay_of_a_retry_is_over_after_as_much_time(instance: Instance) -> None:
    run = await instance.trigger(kit_actions.fail)
    assert (await instance.attempt(run.id)).state == "pending"
    await instance.advance("4m")
    assert await instance.run_due() == []
    with pytest.raises(EngineError, match=r"it is due in (59|60)"):
        await instance.attempt(run.id)
    await instance.advance("1m")
    assert [(each.id, each.state) for each in await instance.run_due()] == [(run.id, "failed")]


async def test_a_run_for_later_is_due_at_its_time(instance: Instance) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    run = await instance.trigger(kit_actions.sail, Voyage(), run_at=later)
    await instance.advance("59m")
    assert await instance.run_due() == []
    assert [each.id for each in await instance.run_for("1m")] == [run.id]


async def test_each_slot_that_time_passes_has_one_run(instance: Instance) -> None:
    await instance.advance("9m", kit_actions.log_book)
    assert await instance.runs_triggered() == []
    await instance.advance("51m", kit_actions.log_book)
    runs = await instance.runs_triggered()
    assert [(run.action, run.trigger, run.state) for run in runs] == [("log-book", "schedule", "pending")] * 6
    assert len({run.scheduled_for for run in runs}) == 6


async def test_a_schedule_stands_still_unless_the_test_names_its_action(instance: Instance) -> None:
    await instance.advance("9m")
    await instance.advance("9m", "log-book")
    assert await instance.runs_triggered() == []
    await instance.advance("52w")
    await instance.advance("1m", "log-book")
    assert len(await instance.runs_triggered()) == 1


async def test_a_cron_schedule_has_its_slots_at_its_times(instance: Instance) -> None:
    await instance.advance("28d", "weekly")
    assert len(await instance.runs_triggered("weekly")) == 4


async def test_what_is_due_within_a_time_is_executed_in_its_order(instance: Instance) -> None:
    waiting = await instance.trigger("wait-a-week")
    runs = await instance.run_for("6d22h55m", "weekly")
    assert [run.action for run in runs] == ["wait-a-week", "weekly"]
    assert (await instance.read(waiting.id)).state == "pending"
    runs = await instance.run_for("1h6m", "log-book")
    assert [run.action for run in runs] == [*["log-book"] * 6, "wait-a-week"]
    assert (await instance.read(waiting.id)).result == "arrived"


async def test_the_next_slot_of_an_action_comes_when_the_test_says_so(instance: Instance) -> None:
    run = await instance.schedule(kit_actions.log_book)
    assert (run.trigger, run.state) == ("schedule", "pending")
    assert run.scheduled_for is not None
    assert (await instance.execute(run.id)).result == run.scheduled_for.isoformat()
    assert len(await instance.runs_triggered()) == 1
    with pytest.raises(EngineError, match="has no schedule"):
        await instance.schedule(kit_actions.sail)


async def test_a_rate_is_respected_unless_a_run_is_executed_by_its_id(instance: Instance) -> None:
    runs = [await instance.trigger("scarce") for _ in range(3)]
    assert len(await instance.run_due()) == 1
    await instance.advance("50s")
    assert await instance.run_due() == []
    await instance.advance("15s")
    assert len(await instance.run_due()) == 1
    assert (await instance.execute(runs[2].id)).state == "succeeded"


async def test_too_many_slots_are_an_error(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.fleet.testing.instance.MAX_SLOTS", 10)
    with pytest.raises(EngineError, match="more than 10 slots"):
        await instance.advance("30d", "log-book")


# -- deaths and takeovers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", SAIL_POINTS)
async def test_an_attempt_dies_at_a_point_and_the_run_is_rescued(instance: Instance, point: str) -> None:
    name, number = point.split()
    run = await instance.run(kit_actions.sail, Voyage(), dies_at(name, int(number)))
    assert (run.state, await effects(instance)) == ("succeeded", ["Turku"])
    committed = name in {"committed", "return"}
    assert run.attempt == (1 if committed else 2)
    died = [event for event in run.events if event.kind == "state" and "died" in str(event.data.get("error"))]
    assert len(died) == (0 if committed else 1)
    # The code of a dead attempt does not go on, not even in `finally`.
    assert done == ([] if committed else ["finally of attempt 2"]) or name == "return"


async def test_a_dead_attempt_continues_after_its_last_checkpoint(instance: Instance) -> None:
    run = await instance.run(kit_actions.sail, Voyage(), dies_at("checkpoint", 3))
    assert instance.points[:3] == (("start", 1), ("event", 1), ("leg", 1))
    assert run.last_checkpoint == 3
    done_legs = [event.data["done"] for event in run.events if event.kind == "progress"]
    assert done_legs[-1] == pytest.approx(2 / 3)


async def test_each_attempt_may_have_its_fault(instance: Instance) -> None:
    run = await instance.run(
        kit_actions.sail, Voyage(), dies_at("start"), overtaken_at("checkpoint"), dies_at("commit")
    )
    assert (run.state, run.attempt, await effects(instance)) == ("succeeded", 4, ["Turku"])


async def test_other_tasks_of_a_dead_attempt_stop_too(instance: Instance) -> None:
    await instance.run("sail-in-parts", None, dies_at("checkpointed"))
    assert done == ["the other task"]


@pytest.mark.parametrize("point", ["start", "checkpoint", "checkpointed", "commit", "committed", "return"])
async def test_a_plain_function_dies_in_its_thread(instance: Instance, point: str) -> None:
    run = await instance.run(kit_actions.moor, Voyage(to="Oslo"), dies_at(point))
    assert (run.state, await effects(instance)) == ("succeeded", ["Oslo"])


@pytest.mark.parametrize("point", ["start", "checkpoint", "leg", "commit"])
async def test_an_attempt_that_is_overtaken_cannot_write_any_more(instance: Instance, point: str) -> None:
    run = await instance.run(kit_actions.sail, Voyage(), overtaken_at(point))
    assert (run.state, run.attempt, await effects(instance)) == ("succeeded", 2, ["Turku"])


async def test_an_attempt_that_has_committed_cannot_be_overtaken(instance: Instance) -> None:
    with pytest.raises(AssertionError, match="at committed 1: it is succeeded"):
        await instance.run(kit_actions.sail, Voyage(), overtaken_at("committed"))


async def test_an_attempt_cannot_be_overtaken_while_a_transaction_guards_its_run(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.testing.worker.RESCUE_TIMEOUT", 0.5)
    with pytest.raises(EngineError, match=r"as `run\.guard` does"):
        await instance.run("sail-guarded", None, overtaken_at("transaction"))


async def test_a_fault_at_a_point_that_is_not_reached_fails_the_test(instance: Instance) -> None:
    with pytest.raises(AssertionError, match="never reached checkpoint 4; it reached start 1, event 1"):
        await instance.run(kit_actions.sail, Voyage(), dies_at("checkpoint", 4))
    with pytest.raises(AssertionError, match="has succeeded before it dies at start 1"):
        await instance.run(kit_actions.sail, Voyage(), dies_at("committed"), dies_at("start"))


async def test_keys_and_locks_of_a_dead_attempt_are_free(instance: Instance) -> None:
    unloaded = await instance.run("unload-once", None, dies_at("transaction"))
    assert (unloaded.result, await effects(instance)) == ("new", ["unloaded"])
    assert (await instance.run("unload-once")).result == "seen"
    assert (await instance.run("lift", None, dies_at("checkpointed"))).state == "succeeded"


async def test_an_open_transaction_of_a_dead_attempt_is_rolled_back(instance: Instance) -> None:
    """It has locked the row of the run, which could not be rescued otherwise."""
    run = await instance.run("sail-guarded", None, dies_at("transaction"))
    assert (run.state, run.attempt, await effects(instance)) == ("succeeded", 2, ["guarded"])


async def test_a_trigger_of_its_own_is_a_point(instance: Instance) -> None:
    await instance.run("fleet-order", None, dies_at("commit"), dies_at("trigger"))
    assert len(await instance.runs_triggered("sail")) == 1
    assert len(await instance.runs_triggered("moor")) == 2


async def test_an_action_that_survives_has_the_same_effects_wherever_it_dies(instance: Instance) -> None:
    async def arrange() -> Voyage:
        return Voyage(to="Turku")

    async def found(run: StoredRun) -> list[str]:
        return await effects(instance, run)

    points = await instance.survives(kit_actions.sail, arrange, found)
    assert list(map(str, points)) == SAIL_POINTS
    assert len(await effects(instance)) == len(points) + 1


async def test_each_round_has_the_keys_that_were_there_before_the_first(instance: Instance) -> None:
    async def arrange() -> None: ...

    async def unloaded(run: StoredRun) -> list[str]:
        return await effects(instance, run)

    async def ordered(run: StoredRun) -> int:
        return len([each for each in await instance.runs_triggered("moor") if each.triggered_by == run.id])

    points = await instance.survives("unload-once", arrange, unloaded)
    assert "transaction 1" in map(str, points)
    assert await effects(instance) == ["unloaded"] * (len(points) + 1)
    points = await instance.survives("order-keyed", arrange, ordered)
    assert len(await instance.runs_triggered("moor")) == len(points) + 1
    # The keys of the last rounds were there before these.
    assert "transaction 1" not in map(str, await instance.survives("unload-once", arrange, unloaded))


async def test_an_action_whose_effects_change_with_a_death_does_not_survive(instance: Instance) -> None:
    async def arrange() -> None: ...

    async def found(run: StoredRun) -> list[str]:
        return await effects(instance, run)

    with pytest.raises(
        AssertionError, match=r"died at return 1, .*\n  expected \['twice'\]\n  found    \['twice', 'tw"
    ):
        await instance.survives("sail-twice", arrange, found)


async def test_an_active_run_is_refused_as_in_production(instance: Instance) -> None:
    await instance.schedule("only-one")
    with pytest.raises(AlreadyActive):
        await trigger("only-one")
    with pytest.raises(EngineError, match='has overlap="skip" and a run of it is active'):
        await instance.schedule("only-one")
