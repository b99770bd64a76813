"""Instances whose clocks are an hour wrong use the clock of PostgreSQL, and schedule neither early, late nor twice."""

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
    """Return the path of the library that `faketime` preloads."""
    shown = subprocess.run(
        [program("faketime"), "-f", "+0", "printenv", "LD_PRELOAD"], capture_output=True, text=True, check=True
    )
    return shown.stdout.strip()


@pytest.fixture
def skewed(address: str, tmp_path: Path) -> Fleet:
    # Only the time of day is wrong; the monotonic clock is correct.
    wrong = {"LD_PRELOAD": library(), "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}
    return Fleet(address, tmp_path, FLOTILLA_ACTIONS="tests.support.trial_schedules", **wrong)


@pytest.mark.long
def test_slots_are_scheduled_on_time_by_instances_with_wrong_clocks(skewed: Fleet, address: str) -> None:
    """Each instance is the leader for six slots of one second, which takes most of the half minute of this test."""
    with skewed as fleet, psycopg.connect(address, autocommit=True) as session:
        instances = [fleet.launch(FAKETIME=skew).wait_ready() for skew in SKEWS]
        assert seconds_from_now(instances[0].me()["started_at"]) < 60, "the registry uses the clock of PostgreSQL"
        logged = instances[0].lines("instance.ready")[0]["time"]
        assert seconds_from_now(logged) > 3000, "the clock of the process is really wrong"

        began = datetime.now(UTC)
        # Also the slots that a busy machine is late for, or that fall into a change of the leader, get a run.
        session.execute(
            "UPDATE flotilla.actions SET schedule = 'every 1s', misfire = 'all', next_run_at = now() + interval '1 s'"
        )
        for _ in range(len(instances)):
            # The clock of the leader is wrong. Then the leader is killed, and an instance with another clock continues.
            due = count_runs(session) + SLOTS
            eventually(lambda due=due: count_runs(session) >= due)  # type: ignore[misc]
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
    assert max(late) < 60, "and not late by the error of the clocks"


def count_runs(session: psycopg.Connection[tuple[object, ...]]) -> int:
    return len(session.execute(RUNS).fetchall())


def seconds_from_now(instant: str) -> float:
    return abs(datetime.fromisoformat(instant).timestamp() - time.time())
