"""Instances whose clocks are an hour wrong, either way, act on PostgreSQL's and so neither early, late nor twice."""

import itertools
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest

from tests.support.fleet import Fleet, leader_of
from tests.support.postgres import eventually
from tests.support.tools import program

SKEWS = ("+1h", "-1h", "+0")
SLOTS = 6
RUNS = """
SELECT scheduled_for, started_at, instance FROM flotilla.finished_runs WHERE trigger = 'schedule' ORDER BY scheduled_for
"""


def library() -> str:
    """Where the library is that `faketime` puts before the process."""
    shown = subprocess.run(
        [program("faketime"), "-f", "+0", "printenv", "LD_PRELOAD"], capture_output=True, text=True, check=True
    )
    return shown.stdout.strip()


@pytest.fixture
def skewed(address: str, tmp_path: Path) -> Fleet:
    # A clock that was set wrong is wrong about the time of day; what measures durations goes on as before.
    wrong = {"LD_PRELOAD": library(), "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}
    return Fleet(address, tmp_path, FLOTILLA_ACTIONS="tests.support.trial_schedules", **wrong)


@pytest.mark.long
def test_the_clock_of_an_instance_decides_nothing(skewed: Fleet, address: str) -> None:
    """Each instance leads for some slots of a second each; that is most of the half minute that it takes."""
    with skewed as fleet, psycopg.connect(address, autocommit=True) as session:
        instances = [fleet.launch(FAKETIME=skew).wait_ready() for skew in SKEWS]
        assert far_off(instances[0].me()["started_at"]) < 60, "the register goes by PostgreSQL's clock"
        logged = instances[0].lines("instance.ready")[0]["time"]
        assert far_off(logged) > 3000, "and the process really has another"

        began = datetime.now(UTC)
        session.execute("UPDATE flotilla.actions SET schedule = 'every 1s', next_run_at = now() + interval '1 s'")
        for _ in range(len(instances)):
            # Whichever leads, its clock is wrong; then it leaves, and one that is wrong the other way goes on.
            due = count(session) + SLOTS
            eventually(lambda due=due: count(session) >= due)  # type: ignore[misc]
            leader = leader_of(instances)
            instances.remove(leader)
            leader.kill()
            if not instances:
                break
        rows = session.execute(RUNS).fetchall()
    slots = [slot for slot, _, _ in rows]
    assert len(slots) == len(set(slots))
    assert all((later - sooner).total_seconds() == 1 for sooner, later in itertools.pairwise(slots))
    assert slots[0] > began
    late = [(started - slot).total_seconds() for slot, started, _ in rows]
    assert min(late) >= 0, "never early"
    assert max(late) < 60, "and not late by what the clocks are wrong"


def count(session: psycopg.Connection[tuple[object, ...]]) -> int:
    return len(session.execute(RUNS).fetchall())


def far_off(instant: str) -> float:
    return abs(datetime.fromisoformat(instant).timestamp() - time.time())
