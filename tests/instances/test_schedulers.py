"""Several schedulers, one due action, one run: with real instances that all read at the same moment."""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import TupleRow

from tests.support.fleet import Fleet, InstanceProcess, blocked, leader_of
from tests.support.postgres import eventually
from tests.support.rounds import rounds

ROUNDS = rounds(1000)
COUNT = re.compile(r"^flotilla_slots_scheduled_total (\S+)", re.MULTILINE)
# The slot is due now, and all instances are notified at once, so that no follower waits for the leader.
MAKE_DUE = """
WITH due AS (
    UPDATE flotilla.actions SET next_run_at = clock_timestamp() WHERE name = 'seldom' RETURNING next_run_at
)
SELECT next_run_at, pg_notify('flotilla', 'slots:') FROM due
"""
HAS_ADVANCED = "SELECT 1 FROM flotilla.actions WHERE name = 'seldom' AND next_run_at > clock_timestamp()"
COUNT_SLOT_KEYS = "SELECT count(*) FROM flotilla.run_keys WHERE key LIKE 'slot:%%'"
RUNS = """
SELECT scheduled_for, count(*)
FROM (SELECT scheduled_for FROM flotilla.runs UNION ALL SELECT scheduled_for FROM flotilla.finished_runs) AS r
GROUP BY scheduled_for
"""


@pytest.fixture
def session(address: str) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(address, autocommit=True) as own:
        yield own


def count_slot_keys(session: psycopg.Connection[TupleRow]) -> int:
    row = session.execute(COUNT_SLOT_KEYS).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.rounds
@pytest.mark.long
@pytest.mark.parametrize("number", [2, 5, 10])
def test_several_schedulers_insert_one_run_for_each_slot(
    address: str, tmp_path: Path, session: psycopg.Connection[TupleRow], number: int
) -> None:
    """With many slots one after the other, a thousand in `make chaos`, even a rare race is found."""
    quiet = {"FLOTILLA_ACTIONS": "tests.support.trial_schedules", "FLOTILLA_LOG_LEVEL": "warning"}
    with Fleet(address, tmp_path, FLOTILLA_POOL_MIN="1", FLOTILLA_POOL_MAX="6", **quiet) as fleet:
        instances = fleet.start(number)
        slots = set()
        for _ in range(ROUNDS):
            row = session.execute(MAKE_DUE).fetchone()
            assert row is not None
            slots.add(row[0])
            # The slot advances in the transaction that inserts the run, and this query is cheap in each round.
            eventually(lambda: session.execute(HAS_ADVANCED).fetchone(), every=0.001)
        assert count_slot_keys(session) == ROUNDS
        made: dict[datetime, int] = dict(session.execute(RUNS).fetchall())
        assert made == dict.fromkeys(slots, 1)
        # An instance counts the slot a moment after the commit.
        eventually(lambda: sum(map(scheduled_by, instances)) == ROUNDS)
        # More than one instance took part, otherwise there was no race.
        assert len([instance for instance in instances if scheduled_by(instance)]) > 1


def scheduled_by(instance: InstanceProcess) -> int:
    found = COUNT.search(instance.client.get("/metrics").text)
    assert found is not None
    return int(float(found[1]))


def test_the_followers_schedule_when_the_leader_is_blocked(
    address: str, tmp_path: Path, session: psycopg.Connection[TupleRow]
) -> None:
    """The link of the leader is a thread, so it stays leader; its event loop is blocked, so it schedules nothing."""
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS="tests.support.trial_schedules") as fleet:
        instances = fleet.start(2)
        leader = leader_of(instances)
        name = leader.me()["name"]
        (follower,) = [instance for instance in instances if instance is not leader]
        with blocked(leader, seconds=600) as request:
            session.execute("UPDATE flotilla.actions SET next_run_at = clock_timestamp()")
            eventually(lambda: count_slot_keys(session) == 1)
            assert follower.instances()["leader"] == name, "it was the leader all the time"
            assert request.is_alive(), "it was blocked all the time"
            leader.kill()
