"""The cost of an order: no-op runs with ordering keys, executed by one process, compared with runs without a key.

Each round is a burn-down as in `throughput`, on one real server process and one database. With one ordering key, each
run waits until the end of the run before it is durable: a claim and a completion, one after the other. With many keys,
a claim and a completion serve as many runs as there are keys. The number of runs of a key should cost nothing: with one
key, the time of the last quarter is compared with the first.
"""

import statistics
import tempfile
from pathlib import Path

from benchmarks.conditions import ACTIONS, durable_server
from benchmarks.report import rates, spread, verdict
from benchmarks.throughput import AT_ONCE, CONCURRENCY, burn_down
from tests.support.fleet import Fleet
from tests.support.postgres import Postgres

ROUNDS = 3
PLAIN = "no key"
# The number of ordering keys, and of runs in all of them together.
SHAPES = {PLAIN: (0, 50_000), "1 key": (1, 5000), "100 keys": (100, 20_000), "5,000 keys": (5000, 20_000)}
MIN_LAST_QUARTER = 0.75

QUARTERS = """
WITH run AS (
    SELECT finished_at, ntile(4) OVER (ORDER BY id) AS quarter
    FROM (SELECT id, finished_at FROM flotilla.finished_runs ORDER BY id DESC LIMIT %s) AS last
)
SELECT extract(epoch FROM max(finished_at) FILTER (WHERE quarter = 1) - min(finished_at) FILTER (WHERE quarter = 1))
       / extract(epoch FROM max(finished_at) FILTER (WHERE quarter = 4) - min(finished_at) FILTER (WHERE quarter = 4))
FROM run
"""


def run(*, short: bool) -> None:
    rounds, share = (1, 0.2) if short else (ROUNDS, 1.0)
    measured: dict[str, list[float]] = {name: [] for name in SHAPES}
    quarters = []
    settings = {"FLOTILLA_CONCURRENCY": str(CONCURRENCY), "FLOTILLA_LOG_LEVEL": "warning"}
    with durable_server() as postgres, tempfile.TemporaryDirectory() as folder:
        address = postgres.new_database()
        with Fleet(address, Path(folder), FLOTILLA_ACTIONS=ACTIONS, **settings) as fleet:
            (instance,) = fleet.start()
            for _ in range(rounds):
                for name, (keys, runs) in SHAPES.items():
                    count = max(AT_ONCE, int(runs * share))
                    measured[name].append(burn_down(postgres, address, instance, count, keys))
                    if keys == 1:
                        quarters.append(last_quarter(postgres, address, count))
    print(f"{'':<46} runs/s in each of {rounds} rounds")
    plain = statistics.median(measured[PLAIN])
    for name, each in measured.items():
        print(rates(name, each, ours=None if name == PLAIN else plain))
    kept = verdict(statistics.median(quarters) >= MIN_LAST_QUARTER)
    print(f"{'1 key, its last quarter against its first':<46} {spread(quarters)}   ≥ {MIN_LAST_QUARTER:g}: {kept}")


def last_quarter(postgres: Postgres, address: str, runs: int) -> float:
    """Return the speed of the last quarter of the runs, relative to the first."""
    with postgres.session(address.rpartition("/")[2]) as session:
        row = session.execute(QUARTERS, [runs]).fetchone()
    assert row is not None
    return float(row[0])
