"""Lines keep their order over several instances, whoever is killed or leaves at whatever moment."""

import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import TupleRow

from tests.support.fleet import Fleet, InstanceProcess
from tests.support.ordered import NUMBERED, READ_EFFECTS, runs_by_key
from tests.support.postgres import eventually

INSTANCES = 3
ORDERED = 10
KILLS = 12
# Of all lines together.
BATCH = 40
LONG = 0.5


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    quiet = {"FLOTILLA_ACTIONS": "tests.support.trial_actions", "FLOTILLA_LOG_LEVEL": "warning"}
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(NUMBERED)
    with Fleet(address, tmp_path, FLOTILLA_POOL_MAX="8", **quiet) as own:
        yield own


@pytest.mark.long
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "asked-to-leave"])
def test_lines_keep_their_order_whoever_goes(fleet: Fleet, address: str, kill: bool) -> None:
    """One instance after the other is killed, or leaves in the middle of its runs, and is replaced.

    It takes as long as so many instances need to start, one after the other.
    """
    chance = random.Random(21)
    instances = fleet.start(INSTANCES)
    leaving: list[InstanceProcess] = []
    wanted: dict[str, list[int]] = {f"line-{number}": [] for number in range(ORDERED)}
    with psycopg.connect(address, autocommit=True) as session:
        for _ in range(KILLS if kill else KILLS // 4):
            time.sleep(chance.uniform(0.1, 0.6))
            put_in(chance.choice(instances), wanted, chance)
            victim = eventually(lambda: one_in_a_long_run(session, instances))
            instances.remove(victim)
            if kill:
                victim.kill()
            else:
                victim.terminate()
                leaving.append(victim)
            instances.append(fleet.launch())
            instances[-1].wait_ready()
        eventually(lambda: session.execute("SELECT count(*) FROM flotilla.runs").fetchone() == (0,), within=90)
        effects = session.execute(READ_EFFECTS).fetchall()
        again = session.execute("SELECT count(*) FROM flotilla.finished_runs WHERE attempt > 1").fetchone()
    assert runs_by_key(effects) == wanted
    assert all(instance.process.wait(30) != -signal.SIGKILL for instance in leaving)
    if kill:
        assert again is not None
        assert again[0] > 0, "runs were under way on those that were killed"


def one_in_a_long_run(
    session: psycopg.Connection[TupleRow], instances: Sequence[InstanceProcess]
) -> InstanceProcess | None:
    """An instance that has begun a long run just now, and so ends in the middle of it."""
    found = session.execute(
        "SELECT i.pid FROM flotilla.runs AS r JOIN flotilla.instances AS i ON i.id = r.instance_id "
        "WHERE r.state = 'running' AND (r.payload->>'seconds')::float = %s ORDER BY r.started_at DESC",
        [LONG],
    )
    by_pid = {instance.pid: instance for instance in instances}
    return next((by_pid[pid] for (pid,) in found if pid in by_pid), None)


def put_in(instance: InstanceProcess, wanted: dict[str, list[int]], chance: random.Random) -> None:
    keys = [chance.choice(sorted(wanted)) for _ in range(BATCH)]
    payloads = [{"seconds": chance.choice((0, 0.01, 0.1, LONG))} for _ in keys]
    runs = [
        {"action": "step", "payload": payload, "ordering_key": key} for key, payload in zip(keys, payloads, strict=True)
    ]
    for key, run_id in zip(keys, instance.trigger_all(runs), strict=True):
        wanted[key].append(run_id)
