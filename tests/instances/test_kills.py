"""No acknowledged run is lost, and none has its effect twice, although instances are killed at random moments."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import TupleRow

from tests.support.fleet import Fleet, InstanceProcess
from tests.support.postgres import Postgres, eventually
from tests.support.rounds import rounds
from tests.support.trial_actions import EFFECTS

INSTANCES = 3
KILLS = rounds(30)
IN_FLIGHT = 200


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    quiet = {"FLOTILLA_ACTIONS": "tests.support.trial_actions", "FLOTILLA_LOG_LEVEL": "warning"}
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(EFFECTS)
    with Fleet(address, tmp_path, FLOTILLA_POOL_MAX="8", **quiet) as own:
        yield own


@pytest.mark.rounds
@pytest.mark.long
def test_no_run_is_lost_or_doubled_in_kills_with_two_hundred_runs_in_flight(fleet: Fleet, address: str) -> None:
    """There are always two hundred unfinished runs; one instance after the other is killed and replaced.

    The test takes long because ten instances start one after the other, and thirty in `make chaos`.
    """
    chance = random.Random(20)
    instances = fleet.start(INSTANCES)
    acknowledged: list[int] = []
    with psycopg.connect(address, autocommit=True) as session:
        for _ in range(KILLS):
            victim = chance.choice(instances)
            instances.remove(victim)
            until = time.monotonic() + chance.uniform(0.2, 1.0)
            while time.monotonic() < until:
                acknowledged += top_up(session, chance.choice(instances), chance)
                time.sleep(0.02)
            victim.kill()
            instances.append(fleet.launch())
            instances[-1].wait_ready()
        eventually(lambda: session.execute("SELECT count(*) FROM flotilla.runs").fetchone() == (0,), within=60)
        states: dict[int, str] = dict(session.execute("SELECT id, state FROM flotilla.finished_runs").fetchall())
        effects = effects_of(session)
        rescued = session.execute("SELECT count(*) FROM flotilla.finished_runs WHERE attempt > 1").fetchone()
    assert {states.get(run_id) for run_id in acknowledged} == {"succeeded"}
    assert effects == dict.fromkeys(acknowledged, 1)
    assert rescued is not None
    assert rescued[0] >= KILLS, "the killed instances were executing runs"


def effects_of(session: psycopg.Connection[TupleRow]) -> dict[int, int]:
    return dict(session.execute("SELECT run_id, count(*) FROM public.effects GROUP BY run_id").fetchall())


def top_up(session: psycopg.Connection[TupleRow], instance: InstanceProcess, chance: random.Random) -> list[int]:
    row = session.execute("SELECT count(*) FROM flotilla.runs").fetchone()
    assert row is not None
    missing = IN_FLIGHT - row[0]
    if missing <= 0:
        return []
    names = ("note", "note-in-thread")
    runs = [{"action": chance.choice(names), "payload": {"seconds": chance.uniform(0, 2)}} for _ in range(missing)]
    return instance.trigger_all(runs)


def test_runs_of_a_killed_leader_continue_from_their_checkpoint_on_another_instance(
    fleet: Fleet, tmp_path: Path
) -> None:
    (leader,) = fleet.start()
    # No run ends before the leader is killed.
    gate = tmp_path / "gate"
    payload = {"steps": 20, "seconds": 0.05, "gate": str(gate)}
    ids = leader.trigger_all([{"action": "walk", "payload": payload}] * 10)
    (other,) = fleet.start()
    eventually(lambda: all((leader.run(each)["progress"] or {"done": 0})["done"] > 0.1 for each in ids))
    leader.kill()
    gate.touch()
    for run in [other.ended(run_id) for run_id in ids]:
        assert (run["state"], run["attempt"]) == ("succeeded", 2)
        assert len(run["result"]["instances"]) == 2, "the run continued from its checkpoint"


def test_the_key_of_a_killed_attempt_is_processed_by_the_next_one_with_one_effect(
    fleet: Fleet, address: str, tmp_path: Path
) -> None:
    (owner,) = fleet.start()
    # The gate never opens: the attempt is killed after it has written the effect and before it commits.
    run_id = owner.trigger("sift", {"key": "k", "gate": str(tmp_path / "shut")})["id"]
    with psycopg.connect(address, autocommit=True) as session:
        eventually(lambda: session.execute("SELECT 1 FROM flotilla.once_keys WHERE state = 'pending'").fetchone())
        (other,) = fleet.start()
        owner.kill()
        run = other.ended(run_id)
        assert (run["state"], run["attempt"], run["result"]) == ("succeeded", 2, "new")
        assert effects_of(session) == {run_id: 1}
        assert session.execute("SELECT state FROM flotilla.once_keys").fetchall() == [("seen",)]


def test_concurrent_triggers_with_one_key_on_two_instances_make_one_run(fleet: Fleet) -> None:
    instances = fleet.start(2)
    with ThreadPoolExecutor(8) as pool:
        for number in range(100):
            triggered = [pool.submit(instance.trigger, "noop", key=f"k-{number}") for instance in instances * 4]
            assert len({each.result()["id"] for each in triggered}) == 1


@pytest.mark.long
def test_no_run_is_lost_in_an_outage_of_the_database_of_twenty_seconds(own_postgres: Postgres, tmp_path: Path) -> None:
    """The outage is longer than all timeouts: leases, patience, grace periods, and the pauses of the pool."""
    address = own_postgres.address_of()
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(EFFECTS)
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS="tests.support.trial_actions") as fleet:
        instances = fleet.start(2)
        before = [instance.me()["id"] for instance in instances]
        runs = [{"action": "note", "payload": {"seconds": 0.05 * number}} for number in range(100)]
        ids = instances[0].trigger_all(runs)
        eventually(lambda: instances[0].run(ids[10])["state"] == "succeeded")
        own_postgres.stop("immediate")
        time.sleep(20)
        own_postgres.start_again()
        for instance in instances:
            instance.wait_ready()
        states = {instances[1].ended(run_id, within=60)["state"] for run_id in ids}
        assert states == {"succeeded"}
        with psycopg.connect(address) as session:
            effects = effects_of(session)
        assert effects == dict.fromkeys(ids, 1)
        assert [instance.me()["id"] for instance in instances] == before, "no instance had to be restarted"
