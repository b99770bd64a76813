"""What an idle cluster costs, from PostgreSQL's own record: every statement it was sent, by session.

The record is the server's log with `log_statement = all`; transaction counts would not see the leader's looks, which
happen inside one. The figures are in the benchmark; the bounds here are the promised ones.
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
def test_an_idle_follower_sends_two_statements_a_second_at_most_and_the_leader_ten(tmp_path: Any) -> None:
    with server(configuration=CONFIGURATION) as postgres, Fleet(postgres.address_of(), tmp_path) as fleet:
        instances = fleet.start(3)
        leader = leader_of(instances).me()["name"]
        names = {instance.me()["name"] for instance in instances}
        # What a start costs, and what a busy machine makes come in heaps, is not in each of the spans.
        rates = [rates_of(postgres, names) for _ in range(SPANS)]
    for name in names:
        low, *_ = sorted(each[name] for each in rates)
        assert 0.5 < low <= (10 if name == leader else 2), rates


def rates_of(postgres: Postgres, names: set[str]) -> dict[str, float]:
    """How many statements a second each of them sends, over some seconds."""
    before, began = statements(postgres.log), time.monotonic()
    time.sleep(WATCHED)
    sent, seconds = statements(postgres.log), time.monotonic() - began
    sent.subtract(before)
    # The pools' sessions do not say whose they are, and all do the same: each instance looks every two seconds.
    pooled = sum(n for (_, who), n in sent.items() if who not in names) / len(names)
    return {name: (sum(n for (_, who), n in sent.items() if who == name) + pooled) / seconds for name in names}
