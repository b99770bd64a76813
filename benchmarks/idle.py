"""The cost of an idle cluster for PostgreSQL: statements per second by role, from the server's log of statements."""

import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.conditions import ACTIONS
from benchmarks.report import verdict
from tests.instances.test_cost import CONFIGURATION, statements
from tests.support.fleet import Fleet, leader_of
from tests.support.postgres import server

SIZES = (1, 5, 20)
SETTLED = 3.0
WATCHED = 20.0
MAX_FOLLOWER = 2.0
MAX_LEADER = 10.0


def run(*, short: bool) -> None:
    sizes, settled, watched = ((2,), 1.0, 2.0) if short else (SIZES, SETTLED, WATCHED)
    columns = (
        f"{'instances':>9}  {'total/s':>8}  {'leader/s':>8}  {'a follower/s':>12}  {'at highest/s':>9}  {'sessions':>8}"
    )
    print(f"{columns}   (leader ≤ {MAX_LEADER:.0f}, each follower ≤ {MAX_FOLLOWER:.0f})")
    for size in sizes:
        print(watch(size, settled, watched), flush=True)


def watch(size: int, settled: float, watched: float) -> str:
    """Start instances, let them idle, and count their statements."""
    with (
        server(configuration=CONFIGURATION) as postgres,
        tempfile.TemporaryDirectory() as folder,
        Fleet(postgres.address_of(), Path(folder), FLOTILLA_ACTIONS=ACTIONS) as fleet,
    ):
        instances = fleet.start(size)
        leader = leader_of(instances).me()["name"]
        names = {instance.me()["name"] for instance in instances}
        time.sleep(settled)
        with postgres.session() as session:
            row = session.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'flotilla/%'"
            ).fetchone()
        assert row is not None
        before = statements(postgres.log)
        time.sleep(watched)
        sent = statements(postgres.log)
        sent.subtract(before)
    by_instance: Counter[str] = Counter()
    for (_, who), count in sent.items():
        by_instance[who] += count
    total = sum(by_instance.values()) / watched
    own = by_instance.pop(leader) / watched
    # Statements of the pool do not have an instance's name: they are divided among all instances.
    nameless = sum(count for who, count in by_instance.items() if who not in names) / watched / size
    rest = [by_instance[name] / watched + nameless for name in names if name != leader]
    each = sum(rest) / len(rest) if rest else 0.0
    highest = max(rest, default=0.0)
    kept = verdict(own + nameless <= MAX_LEADER and highest <= MAX_FOLLOWER)
    return f"{size:>9}  {total:>8.2f}  {own + nameless:>8.2f}  {each:>12.2f}  {highest:>9.2f}  {row[0]:>8}   {kept}"
