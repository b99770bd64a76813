"""No-op async runs claimed, executed and durably completed by one process, compared with bare SQL and with the peers.

A burn-down: the backlog is inserted while the action is paused, then all tables are vacuumed and a checkpoint is made.
The clock runs from just before the action is resumed over REST until PostgreSQL has written the last completion (the
latest `finished_at`). Ours is a real server process, `flotilla serve`, with uvloop, which is its default. All subjects
use one server, each with its own database, which fills up from round to round. In each round, all subjects run one
after another.

The same is measured with the feed switched off: the difference is the cost of the feed.

pgbench shows the limit of bare SQL with two sessions and without Python: claim 100, commit, complete them, commit; once
with the rows completed in place, and once with the rows moved to a history table, as ours are.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from app.fleet.db.embedded import USER
from app.fleet.db.namespace import Namespace
from app.fleet.runs.insert import INSERT, INSERT_ORDERED
from benchmarks import peers
from benchmarks.conditions import ACTIONS, durable_server
from benchmarks.report import rates, verdict
from tests.support.fleet import ROOT, Fleet, InstanceProcess
from tests.support.postgres import Postgres

ROUNDS = 5
RUNS = 100_000
MIN_RATE = 40_000
WITHOUT = "Flotilla, the feed switched off"
MAX_COST = 0.10
CONCURRENCY = 2000
AT_ONCE = 1000
NAMESPACE = Namespace("flotilla")
# By batch size: fewer jobs for the slower ones, and the number of connections that was fastest.
PGQUEUER = {10: (20_000, 5), 100: (50_000, 2), 500: (50_000, 1)}
PROCRASTINATE = (2000, 5, 7)

QUEUE = """
CREATE TABLE IF NOT EXISTS queue (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    state text NOT NULL DEFAULT 'pending',
    started_at timestamptz,
    finished_at timestamptz
) WITH (fillfactor = 70);
CREATE INDEX IF NOT EXISTS queue_pending ON queue (id) WHERE state = 'pending';
CREATE TABLE IF NOT EXISTS history (LIKE queue, PRIMARY KEY (id));
"""
CLAIM = """
WITH claimed AS (
    UPDATE queue SET state = 'running', started_at = clock_timestamp()
    WHERE id = ANY (ARRAY(SELECT id FROM queue WHERE state = 'pending' ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED))
    RETURNING id
)
SELECT array_agg(id)::text AS ids FROM claimed \\gset
"""
IN_PLACE = "UPDATE queue SET state = 'succeeded', finished_at = clock_timestamp() WHERE id = ANY (:ids::bigint[]);\n"
MOVED = """
WITH gone AS (DELETE FROM queue WHERE id = ANY (:ids::bigint[]) RETURNING *)
INSERT INTO history SELECT id, 'succeeded', started_at, clock_timestamp() FROM gone;
"""
LEFT = "SELECT EXISTS (SELECT FROM flotilla.runs)"


def run(*, short: bool) -> None:
    rounds, share = (1, 0.02) if short else (ROUNDS, 1.0)
    with durable_server() as postgres, ExitStack() as stack:
        subjects: dict[str, Callable[[], float]] = {
            "Flotilla, one process": one_process(postgres, stack, int(RUNS * share)),
            WITHOUT: one_process(postgres, stack, int(RUNS * share), FLOTILLA_FEED_RETENTION="0"),
            "pgbench, bare SQL, 2 × 100, completed in place": bare_sql(postgres, stack, IN_PLACE, int(RUNS * share)),
            "pgbench, bare SQL, 2 × 100, moved to a history": bare_sql(postgres, stack, MOVED, int(RUNS * share)),
        }
        if peers.installed():
            subjects |= others(postgres, share)
        measured: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(rounds):
            for name, measure in subjects.items():
                measured[name].append(measure())
    print(f"{'':<46} jobs/s in each of {rounds} rounds")
    (own_name, own), *rest = measured.items()
    median = sorted(own)[len(own) // 2]
    print(rates(own_name, own, least=MIN_RATE))
    for name, each in rest:
        print(rates(name, each, ours=median))
    cost = 1 - median / statistics.median(measured[WITHOUT])
    print(f"{'the feed costs':<46} {max(0.0, cost):.1%}   ≤ {MAX_COST:.0%}: {verdict(cost <= MAX_COST)}")
    if not peers.installed():
        print("PgQueuer and Procrastinate: SKIPPED, not installed; `make bench` installs them")


# -- ours -------------------------------------------------------------------------------------------------------------


def one_process(postgres: Postgres, stack: ExitStack, runs: int, **env: str) -> Callable[[], float]:
    address = postgres.new_database()
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    fleet = stack.enter_context(
        Fleet(
            address,
            Path(folder),
            FLOTILLA_ACTIONS=ACTIONS,
            FLOTILLA_CONCURRENCY=str(CONCURRENCY),
            FLOTILLA_LOG_LEVEL="warning",
            **env,
        )
    )
    (instance,) = fleet.start()
    return lambda: burn_down(postgres, address, instance, runs)


def burn_down(postgres: Postgres, address: str, instance: InstanceProcess, runs: int, keys: int = 0) -> float:
    """Return the runs per second of one round. With `keys`, the runs have so many ordering keys in turn."""
    with postgres.session(address.rpartition("/")[2]) as session:
        post(instance, "/actions/noop/pause")
        row = session.execute("SELECT id, max_attempts FROM flotilla.actions WHERE name = 'noop'").fetchone()
        assert row is not None
        batch = {
            "actions": [row[0]] * AT_ONCE,
            "priorities": [0] * AT_ONCE,
            "run_ats": [None] * AT_ONCE,
            "max_attempts": [row[1]] * AT_ONCE,
            "payloads": [None] * AT_ONCE,
            "trigger": "code",
            "mark": None,
            "triggered_by": None,
            "request_id": None,
            "trace_parent": None,
        }
        for first in range(0, runs, AT_ONCE):
            if keys:
                batch["ordering_keys"] = [f"line-{number % keys}" for number in range(first, first + AT_ONCE)]
            session.execute(NAMESPACE.sql(INSERT_ORDERED if keys else INSERT), batch)
        session.execute("VACUUM ANALYZE")
        session.execute("CHECKPOINT")
        began = session.execute("SELECT clock_timestamp()").fetchone()
        post(instance, "/actions/noop/resume")
        while session.execute(LEFT).fetchone() != (False,):
            time.sleep(0.2)
        ended = session.execute(
            "SELECT count(*), extract(epoch FROM max(finished_at) - %s) FROM flotilla.finished_runs "
            "WHERE state = 'succeeded' AND started_at > %s",
            [began[0], began[0]] if began else None,
        ).fetchone()
    assert ended is not None
    if ended[0] != runs:
        raise RuntimeError(f"{ended[0]} of {runs} runs succeeded")
    return runs / float(ended[1])


def post(instance: InstanceProcess, path: str) -> None:
    answer = instance.client.post(path)
    if answer.status_code != 200:
        raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")


# -- the limit --------------------------------------------------------------------------------------------------------


def bare_sql(postgres: Postgres, stack: ExitStack, complete: str, rows: int) -> Callable[[], float]:
    database = postgres.new_database().rpartition("/")[2]
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    Path(folder).chmod(0o755)
    script = Path(folder) / "claim-and-complete.sql"
    script.write_text(CLAIM + complete)
    transactions = rows // 100 // 2

    def measure() -> float:
        with postgres.session(database) as session:
            session.execute(QUEUE)
            session.execute("INSERT INTO queue SELECT FROM generate_series(1, %s)", [transactions * 200])
            session.execute("VACUUM ANALYZE")
            session.execute("CHECKPOINT")
        return pgbench(postgres, database, script, "-c", "2", "-t", str(transactions)) * 100

    return measure


def pgbench(postgres: Postgres, database: str, script: Path, *options: str) -> float:
    """Run a script with two threads and prepared statements; return the transactions per second."""
    command = [str(postgres.binaries / "pgbench"), "-n", "-M", "prepared", "-j", "2", "-f", str(script), *options]
    run_as = USER if os.geteuid() == 0 else None
    return output_of([*command, postgres.address_of(database)], r"tps = ([\d.]+)", run_as)


def output_of(command: list[str], pattern: str, run_as: str | None = None) -> float:
    """Run a program, and read a number from its output."""
    done = subprocess.run(command, cwd=ROOT, user=run_as, capture_output=True, text=True, timeout=600, check=False)
    found = re.search(pattern, done.stdout)
    if done.returncode != 0 or found is None:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout}\n{done.stderr}")
    return float(found[1])


# -- the peers --------------------------------------------------------------------------------------------------------


def others(postgres: Postgres, share: float) -> dict[str, Callable[[], float]]:
    measures = {}
    for batch, (jobs, connections) in PGQUEUER.items():
        label = f"PgQueuer {version('pgqueuer')}, batch {batch}, {connections} connections"
        measures[label] = peer(postgres.new_database(), "pgqueuer", int(jobs * share), batch, connections)
    jobs, concurrency, connections = PROCRASTINATE
    label = f"Procrastinate {version('procrastinate')}, concurrency {concurrency}"
    measures[label] = peer(postgres.new_database(), "procrastinate", int(jobs * share), concurrency, connections)
    return measures


def peer(address: str, name: str, jobs: int, width: int, connections: int) -> Callable[[], float]:
    command = [sys.executable, "-m", "benchmarks.peers", name, address]
    numbers = [str(jobs), str(width), str(connections)]
    return lambda: output_of([*command, *numbers], r"([\d.]+)\s*$")
