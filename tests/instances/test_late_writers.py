"""An instance that was frozen, declared gone and continues cannot change its former runs."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.fleet import Fleet, by_name
from tests.support.postgres import eventually
from tests.support.trial_actions import EFFECTS

WRITES = ("completion", "checkpoint", "event", "guard", "commit", "once")
FENCED = re.compile(r'^flotilla_runs_fenced_total\{write="(\w+)"\} (\S+)', re.MULTILINE)


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS="tests.support.trial_actions") as own:
        yield own


def test_each_late_write_of_a_frozen_instance_is_fenced_and_counted(fleet: Fleet, address: str) -> None:
    (owner,) = fleet.start()
    before = owner.me()
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(EFFECTS)
    ids = {write: owner.trigger("late", {"write": write})["id"] for write in WRITES}
    eventually(lambda: all(owner.run(run_id)["state"] == "running" for run_id in ids.values()))
    (other,) = fleet.start()
    owner.freeze()
    try:
        eventually(lambda: by_name(other.instances())[before["name"]]["state"] == "gone")
        eventually(lambda: all(other.run(run_id)["state"] == "succeeded" for run_id in ids.values()))
        ended = {run_id: other.run(run_id) for run_id in ids.values()}
    finally:
        owner.thaw()
    assert {run["result"] for run in ended.values()} == {"done by another"}
    assert {run["attempt"] for run in ended.values()} == {2}

    eventually(lambda: {line["what"] for line in owner.lines("run.fenced")} >= set(WRITES))
    owner.wait_ready()
    fenced = {what: float(count) for what, count in FENCED.findall(owner.client.get("/metrics").text)}
    assert fenced == dict.fromkeys(WRITES, 1.0)
    assert {run_id: other.run(run_id) for run_id in ids.values()} == ended
    with psycopg.connect(address) as session:
        assert session.execute("SELECT * FROM public.effects").fetchall() == []
        assert session.execute("SELECT kind FROM flotilla.run_events WHERE kind <> 'state'").fetchall() == []
    assert owner.me()["id"] != before["id"]


def test_a_run_is_not_rescued_during_an_open_guarded_transaction(fleet: Fleet, address: str) -> None:
    """The row is locked by the guard: no other attempt begins before this transaction has ended."""
    (owner,) = fleet.start(FLOTILLA_STATEMENT_TIMEOUT="4")
    run = owner.trigger("late", {"write": "completion"})
    eventually(lambda: owner.run(run["id"])["state"] == "running")
    (other,) = fleet.start()
    with psycopg.connect(address) as guarded:
        row = "SELECT FROM flotilla.runs WHERE id = %s AND token = 1 AND state = 'running' FOR KEY SHARE"
        assert guarded.execute(row, [run["id"]]).fetchall() == [()]
        owner.kill()
        eventually(lambda: other.lines("instance.gone"))
        held_until = time.monotonic() + 3
        while time.monotonic() < held_until:
            assert other.run(run["id"])["attempt"] == 1
            time.sleep(0.1)
    eventually(lambda: other.run(run["id"])["state"] == "succeeded")
    assert other.run(run["id"])["attempt"] == 2
