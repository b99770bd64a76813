"""Ordered runs keep their order on several instances, also when instances are killed or leave at random moments."""

import contextlib
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
from tests.support.rounds import rounds

INSTANCES = 3
KEYS = 10
KILLS = rounds(12)
# Runs per batch, of all ordering keys together.
BATCH = 40
LONG = 0.5


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    quiet = {"FLOTILLA_ACTIONS": "tests.support.trial_actions", "FLOTILLA_LOG_LEVEL": "warning"}
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(NUMBERED)
    with Fleet(address, tmp_path, FLOTILLA_POOL_MAX="8", **quiet) as own:
        yield own


@pytest.mark.rounds
@pytest.mark.long
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "asked-to-leave"])
def test_ordered_runs_keep_their_order_when_instances_are_killed_or_leave(
    fleet: Fleet, address: str, kill: bool
) -> None:
    """One instance after the other is killed, or leaves in the middle of its runs, and is replaced.

    The test takes long because each replacement must be ready before the next instance goes.
    """
    chance = random.Random(21)
    instances = fleet.start(INSTANCES)
    leaving: list[InstanceProcess] = []
    expected: dict[str, list[int]] = {f"line-{number}": [] for number in range(KEYS)}
    with psycopg.connect(address, autocommit=True) as session:
        for _ in range(KILLS if kill else -(-KILLS // 4)):
            time.sleep(chance.uniform(0.1, 0.6))
            victim = None
            # On a busy machine, the long runs of a batch may have ended before they were seen.
            while victim is None:
                trigger_batch(chance.choice(instances), expected, chance)
                with contextlib.suppress(AssertionError):
                    victim = eventually(lambda: find_instance_with_a_long_run(session, instances), within=5)
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
    assert runs_by_key(effects) == expected
    assert all(instance.process.wait(30) != -signal.SIGKILL for instance in leaving)
    if kill:
        assert again is not None
        assert again[0] > 0, "the killed instances were executing runs"


def find_instance_with_a_long_run(
    session: psycopg.Connection[TupleRow], instances: Sequence[InstanceProcess]
) -> InstanceProcess | None:
    """Return the instance that has started a long run last, so that it ends in the middle of that run."""
    found = session.execute(
        "SELECT i.pid FROM flotilla.runs AS r JOIN flotilla.instances AS i ON i.id = r.instance_id "
        "WHERE r.state = 'running' AND (r.payload->>'seconds')::float = %s ORDER BY r.started_at DESC",
        [LONG],
    )
    by_pid = {instance.pid: instance for instance in instances}
    return next((by_pid[pid] for (pid,) in found if pid in by_pid), None)


def trigger_batch(instance: InstanceProcess, expected: dict[str, list[int]], chance: random.Random) -> None:
    keys = [chance.choice(sorted(expected)) for _ in range(BATCH)]
    payloads = [{"seconds": chance.choice((0, 0.01, 0.1, LONG))} for _ in keys]
    runs = [
        {"action": "step", "payload": payload, "ordering_key": key} for key, payload in zip(keys, payloads, strict=True)
    ]
    for key, run_id in zip(keys, instance.trigger_all(runs), strict=True):
        expected[key].append(run_id)
