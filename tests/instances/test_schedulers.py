"""N schedulers, one due action, one run: with real instances that all look in the same moment."""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import TupleRow

from tests.support.fleet import Fleet, InstanceProcess, blocked, leader_of
from tests.support.postgres import eventually

ROUNDS = 1000
COUNT = re.compile(r"^flotilla_slots_scheduled_total (\S+)", re.MULTILINE)
# As due as can be, and everyone is told at once: nobody stands back as a follower does.
MAKE_DUE = """
WITH due AS (
    UPDATE flotilla.actions SET next_run_at = clock_timestamp() WHERE name = 'seldom' RETURNING next_run_at
)
SELECT next_run_at, pg_notify('flotilla', 'slots:') FROM due
"""
MOVED_ON = "SELECT 1 FROM flotilla.actions WHERE name = 'seldom' AND next_run_at > clock_timestamp()"
MADE = "SELECT count(*) FROM flotilla.run_keys WHERE key LIKE 'slot:%%'"
RUNS = """
SELECT scheduled_for, count(*)
FROM (SELECT scheduled_for FROM flotilla.runs UNION ALL SELECT scheduled_for FROM flotilla.finished_runs) AS r
GROUP BY scheduled_for
"""


@pytest.fixture
def session(address: str) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(address, autocommit=True) as own:
        yield own


def count(session: psycopg.Connection[TupleRow]) -> int:
    row = session.execute(MADE).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.long
@pytest.mark.parametrize("many", [2, 5, 10])
def test_n_schedulers_make_one_run_of_each_slot(
    address: str, tmp_path: Path, session: psycopg.Connection[TupleRow], many: int
) -> None:
    """A thousand slots, one after the other: a race that one slot in a thousand loses is found."""
    quiet = {"FLOTILLA_ACTIONS": "tests.support.trial_schedules", "FLOTILLA_LOG_LEVEL": "warning"}
    with Fleet(address, tmp_path, FLOTILLA_POOL_MIN="1", FLOTILLA_POOL_MAX="6", **quiet) as fleet:
        instances = fleet.start(many)
        slots = set()
        for _ in range(ROUNDS):
            row = session.execute(MAKE_DUE).fetchone()
            assert row is not None
            slots.add(row[0])
            # It moves on in the transaction that makes the run; to look at it costs the same in each round.
            eventually(lambda: session.execute(MOVED_ON).fetchone(), every=0.001)
        assert count(session) == ROUNDS
        made: dict[datetime, int] = dict(session.execute(RUNS).fetchall())
        assert made == dict.fromkeys(slots, 1)
        # An instance counts what it has made a moment after the commit.
        eventually(lambda: sum(map(made_by, instances)) == ROUNDS)
        # More than one took part in the race, or it was none.
        assert len([instance for instance in instances if made_by(instance)]) > 1


def made_by(instance: InstanceProcess) -> int:
    found = COUNT.search(instance.client.get("/metrics").text)
    assert found is not None
    return int(float(found[1]))


def test_the_followers_schedule_when_the_leader_is_blocked(
    address: str, tmp_path: Path, session: psycopg.Connection[TupleRow]
) -> None:
    """Its link lives in a thread, so it leads on; its event loop is busy, so it schedules nothing."""
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS="tests.support.trial_schedules") as fleet:
        instances = fleet.start(2)
        leader = leader_of(instances)
        name = leader.me()["name"]
        (follower,) = [instance for instance in instances if instance is not leader]
        with blocked(leader, seconds=600) as request:
            session.execute("UPDATE flotilla.actions SET next_run_at = clock_timestamp()")
            eventually(lambda: count(session) == 1)
            assert follower.instances()["leader"] == name, "it led all the time"
            assert request.is_alive(), "and was blocked"
            leader.kill()
