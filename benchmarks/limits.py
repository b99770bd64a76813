"""A limit of 1,000 permits a second, shared by three instances: whether it is kept and reached, and what it costs.

On each instance, several callers ask for the next permit as soon as they have one. First each instance has the same
number of callers, then two of them have hardly any. After a second to settle, the permits are counted by the time at
which they were given, on the machine's clock, which all processes share; and so is each instance's share. `too many` is
the excess in the worst interval: its permits beyond one, plus a thousand for each of its seconds. PostgreSQL counts the
transactions; the transactions of three idle instances are subtracted.
"""

import time
from collections.abc import Sequence

import psycopg

from app.fleet.cluster.link import clock
from benchmarks.conditions import started_instances
from benchmarks.report import verdict
from benchmarks.streams import statements
from tests.support.fleet import InstanceProcess
from tests.support.limits import excess
from tests.support.postgres import eventually

RATE = 1000
SETTLED = 1.0
WATCHED = 10.0
CALLERS = ((100, 100, 100), (400, 10, 1))
MAX_ERROR = 0.01
MAX_STATEMENTS = 50


def run(*, short: bool) -> None:
    # With room for one run each, every instance gets exactly one of the runs.
    env = {"FLOTILLA_ACTIONS": "tests.support.trial_actions", "FLOTILLA_CONCURRENCY": "1"}
    with started_instances(3, **env) as (postgres, _, instances), postgres.session() as session:
        time.sleep(SETTLED)
        idle = rate_of_statements(session, 2.0)
        print(f"without callers: {idle:.0f} statements/s")
        for callers in CALLERS[:1] if short else CALLERS:
            measure(session, instances, callers, 1.0 if short else WATCHED, idle)


def measure(
    session: psycopg.Connection[tuple[object, ...]],
    instances: Sequence[InstanceProcess],
    callers: Sequence[int],
    watched: float,
    idle: float,
) -> None:
    until = clock() + 2 * SETTLED + watched
    payload = {"rate": f"{RATE}/s", "until": until}
    ids = [
        instance.trigger("take-permits", {**payload, "workers": n})["id"]
        for instance, n in zip(instances, callers, strict=True)
    ]
    eventually(lambda: all(instances[0].run(run_id)["state"] == "running" for run_id in ids))
    time.sleep(max(0.0, until - watched - clock()))
    cost = rate_of_statements(session, watched - 0.1) - idle
    shares = {run["instance"]: run["result"] for run in (instances[0].ended(run_id) for run_id in ids)}
    counted = [[each for each in instants if until - watched <= each < until] for instants in shares.values()]
    total = sum(len(each) for each in counted)
    error = total / watched / RATE - 1
    too_many = excess([each for instants in shares.values() for each in instants], 1 / RATE, 1)
    shared = " ".join(f"{len(each) / total:.0%}" for each in counted)
    print(
        f"{'+'.join(map(str, callers)):>12} callers: {total / watched:8,.1f}/s, error {error:+.2%} "
        f"(≤ {MAX_ERROR:.0%}: {verdict(abs(error) <= MAX_ERROR)}); too many: {too_many:.0f}; "
        f"{cost:.0f} statements/s (≤ {MAX_STATEMENTS}: {verdict(cost <= MAX_STATEMENTS)}); "
        f"share of each: {shared}",
        flush=True,
    )


def rate_of_statements(session: psycopg.Connection[tuple[object, ...]], seconds: float) -> float:
    before, began = statements(session), time.monotonic()
    time.sleep(seconds)
    return (statements(session) - before) / (time.monotonic() - began)
