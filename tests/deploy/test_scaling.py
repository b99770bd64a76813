"""The view for autoscalers: who may read it, what it says, and what a loop like KEDA's makes of it."""

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from psycopg.rows import TupleRow

from tests.deploy.declared import ROOT
from tests.support.fleet import Fleet, InstanceProcess, run
from tests.support.postgres import Postgres, eventually

pytestmark = pytest.mark.template

TRIAL = "tests.support.trial_actions"
GRANTS = re.findall(r"^```sql\n(.*?)^```$", (ROOT / "docs/guides/scale.md").read_text(), re.MULTILINE | re.DOTALL)[0]
SCALED: dict[str, Any] = next(iter(yaml.safe_load_all((ROOT / "k8s/components/autoscaling/workers.yaml").read_text())))[
    "spec"
]
RUNS = 10_000


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=TRIAL, FLOTILLA_POOL_MAX="6") as own:
        yield own


def backlog(session: psycopg.Connection[TupleRow]) -> tuple[Any, ...]:
    columns = "runnable_runs, backlog_seconds, busy_workers, ready_workers"
    row = session.execute(f"SELECT {columns} FROM flotilla.worker_backlog".encode()).fetchone()
    assert row is not None
    return row


def desired(session: psycopg.Connection[TupleRow], maximum: int) -> int:
    """Return how many workers KEDA would ask for: the value of each trigger by its target, and the largest wins."""
    wanted: list[int] = [SCALED["minReplicaCount"]]
    for trigger in SCALED["triggers"]:
        row = session.execute(trigger["metadata"]["query"]).fetchone()
        assert row is not None
        wanted.append(math.ceil(row[0] / float(trigger["metadata"]["targetQueryValue"])))
    return min(maximum, max(wanted))


def test_the_role_of_the_scaler_reads_the_view_and_nothing_else(own_postgres: Postgres) -> None:
    address = own_postgres.new_migrated_database()
    database = address.rpartition("/")[2]
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(GRANTS.encode())
    with psycopg.connect(own_postgres.address_of(database, user="flotilla_scaler"), autocommit=True) as scaler:
        for trigger in SCALED["triggers"]:
            assert scaler.execute(trigger["metadata"]["query"]).fetchone() == (0,)
        for table in ("runs", "finished_runs", "actions", "instances", "runnable_runs"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                scaler.execute(f"SELECT * FROM flotilla.{table}")


def test_runs_that_no_further_worker_could_start_do_not_count(fleet: Fleet, address: str) -> None:
    (web,) = fleet.start(FLOTILLA_ROLE="web")
    (worker,) = fleet.start(FLOTILLA_ROLE="worker", FLOTILLA_CONCURRENCY="2")
    with psycopg.connect(address, autocommit=True) as session:
        for run_id in web.trigger_all([{"action": "nap", "payload": {"seconds": 3600}}] * 2):
            eventually(lambda run_id=run_id: web.run(run_id)["state"] == "running")  # type: ignore[misc]
        assert backlog(session) == (0, 0, 1, 1), "the worker is full"
        assert web.client.post("/actions/echo/pause").status_code == 200
        web.trigger_all([{"action": "echo"}] * 10)
        web.trigger_all([{"action": "noop", "ordering_key": "one"}] * 10)
        web.trigger("noop", run_at="2999-01-01T00:00:00Z")
        assert backlog(session) == (1, 0.5, 1, 1), "the first run of the key, for which a second is expected"
        worker.kill()
        eventually(lambda: backlog(session) == (0, 0, 0, 0))


def test_the_doctor_checks_whether_the_server_allows_the_maximum(address: str) -> None:
    few = run("doctor", "--instances", "10", address=address)
    assert "10 instances with these settings may open 120 of" in few.stdout
    assert few.returncode == 0
    many = run("doctor", "--instances", "100", address=address)
    assert many.returncode == 1
    assert "lower the maximum to" in many.stdout


# Longer than for other tests, because the runs alone take a minute, and beside other processes several.
@pytest.mark.timeout(900)
@pytest.mark.long
def test_ten_thousand_runs_scale_the_workers_up_and_down_again(fleet: Fleet, address: str) -> None:
    """The test takes long because ten thousand runs of 50 ms on four slots of a worker take two minutes.

    A loop reads the view and starts and ends workers, as KEDA does, once a second instead of every ten seconds.
    """
    (web,) = fleet.start(FLOTILLA_ROLE="web")
    running: list[InstanceProcess] = fleet.start(FLOTILLA_ROLE="worker", FLOTILLA_CONCURRENCY="4")
    counts: list[int] = [1]
    with psycopg.connect(address, autocommit=True) as session:
        assert web.client.post("/actions/echo/pause").status_code == 200
        web.trigger_all([{"action": "echo"}] * 1000)
        for _ in range(3):
            assert desired(session, maximum=6) == 1, "a paused action does not count"
        began = time.monotonic()
        for _ in range(RUNS // 1000):
            web.trigger_all([{"action": "nap", "payload": {"seconds": 0.05}}] * 1000)
        decided: float | None = None
        while counts[-1] != 1 or max(counts) == 1:
            wanted = desired(session, maximum=6)
            if wanted > 1 and decided is None:
                decided = time.monotonic() - began
            if wanted > len(running):
                running += fleet.start(wanted - len(running), FLOTILLA_ROLE="worker", FLOTILLA_CONCURRENCY="4")
            elif wanted < len(running):
                last = running.pop()
                last.terminate()
                last.wait_exit()
            counts.append(len(running))
            time.sleep(1)  # the interval of the loop
        # One worker is enough for the last runs: those of the paused action are left when it has executed them.
        eventually(lambda: session.execute("SELECT count(*) FROM flotilla.runs").fetchone() == (1000,))
        states: dict[str, int] = dict(
            session.execute("SELECT a.name || ' ' || f.state, count(*) FROM flotilla.finished_runs AS f "
                            "JOIN flotilla.actions AS a ON a.id = f.action_id GROUP BY 1").fetchall()
        )  # fmt: skip
    assert max(counts) == 6
    assert states == {"nap succeeded": RUNS}
    assert decided is not None
