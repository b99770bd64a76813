"""The cost of an idle cluster: the number of statements by session, from the log of PostgreSQL.

The server logs with `log_statement = all`; counting transactions would miss the checks of the leader, which happen
within one. The benchmark prints the figures; the bounds here are the documented ones.
"""

import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import Fleet, leader_of
from tests.support.postgres import Postgres, server

WATCHED = 8.0
SPANS = 2
CONFIGURATION = "log_statement = 'all'\nlog_line_prefix = 'by=%a '\n"
STATEMENT = re.compile(r"^by=flotilla/(?P<namespace>[^/]*)/(?P<role>[^/ ]*)/?(?P<instance>\S*) .*(statement|execute)")


def statements(log: Path) -> Counter[tuple[str, str]]:
    """Count statements by role and instance."""
    found: Counter[tuple[str, str]] = Counter()
    for line in log.read_text(errors="replace").splitlines():
        if parts := STATEMENT.match(line):
            found[parts["role"], parts["instance"]] += 1
    return found


@pytest.mark.long
def test_an_idle_follower_sends_at_most_two_statements_a_second_and_the_leader_ten(tmp_path: Any) -> None:
    with server(configuration=CONFIGURATION) as postgres, Fleet(postgres.address_of(), tmp_path) as fleet:
        instances = fleet.start(3)
        leader = leader_of(instances).me()["name"]
        names = {instance.me()["name"] for instance in instances}
        # The cost of the start, and bursts on a busy machine, are not in each of the spans.
        rates = [rates_of(postgres, names) for _ in range(SPANS)]
    for name in names:
        low, *_ = sorted(each[name] for each in rates)
        assert 0.5 < low <= (10 if name == leader else 2), rates


def rates_of(postgres: Postgres, names: set[str]) -> dict[str, float]:
    """Measure how many statements per second each instance sends."""
    before, began = statements(postgres.log), time.monotonic()
    time.sleep(WATCHED)
    sent, seconds = statements(postgres.log), time.monotonic() - began
    sent.subtract(before)
    # The names of pool sessions do not have the instance, and all pools do the same, so their statements are averaged.
    pooled = sum(n for (_, session_instance), n in sent.items() if session_instance not in names) / len(names)
    return {
        name: (sum(n for (_, session_instance), n in sent.items() if session_instance == name) + pooled) / seconds
        for name in names
    }
