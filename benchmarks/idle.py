"""What an idle cluster costs PostgreSQL: statements per second by role, from the server's own log of statements."""

import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.instances.test_cost import CONFIGURATION, statements
from tests.support.fleet import Fleet, leader_of
from tests.support.postgres import server

SIZES = (1, 5, 10)
WATCHED = 20.0


def run(*, short: bool) -> None:
    sizes, watched = ((1, 3), 5.0) if short else (SIZES, WATCHED)
    print(f"{'instances':>9}  {'total/s':>8}  {'leader/s':>8}  {'a follower/s':>12}  {'sessions':>8}")
    for size in sizes:
        with (
            server(configuration=CONFIGURATION) as postgres,
            tempfile.TemporaryDirectory() as folder,
            Fleet(postgres.address_of(), Path(folder)) as fleet,
        ):
            ships = fleet.start(size)
            leader = leader_of(ships).me()["name"]
            time.sleep(3)
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
        rest = sum(by_instance.values()) / watched
        each = rest / (size - 1) if size > 1 else 0.0
        print(f"{size:>9}  {total:>8.2f}  {own:>8.2f}  {each:>12.2f}  {row[0]:>8}", flush=True)
