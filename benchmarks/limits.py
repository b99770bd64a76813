"""A limit of 1,000 permits a second, shared by three instances: is it kept, is it reached, and what does it cost?

Each instance has so many who ask again as soon as they have a permit: as many at each, and then hardly any at two of
them. Counted are the permits by when they were given, on the machine's clock, which is one for all processes, after a
second to settle; and the share of each instance. `too many` is by how many the worst span of time had more than one and
a thousand for each of its seconds. What PostgreSQL is asked is counted by PostgreSQL: all transactions, less those of
three that are idle.
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
CROWDS = ((100, 100, 100), (400, 10, 1))
ERROR_MOST = 0.01
STATEMENTS_MOST = 50


def run(*, short: bool) -> None:
    # Each has room for one run, so that each has one.
    env = {"FLOTILLA_ACTIONS": "tests.support.trial_actions", "FLOTILLA_CONCURRENCY": "1"}
    with started_instances(3, **env) as (postgres, _, instances), postgres.session() as session:
        time.sleep(SETTLED)
        idle = rate_of_statements(session, 2.0)
        print(f"with nobody who asks: {idle:.0f} statements/s")
        for crowd in CROWDS[:1] if short else CROWDS:
            one_crowd(session, instances, crowd, 1.0 if short else WATCHED, idle)


def one_crowd(
    session: psycopg.Connection[tuple[object, ...]],
    instances: Sequence[InstanceProcess],
    crowd: Sequence[int],
    watched: float,
    idle: float,
) -> None:
    until = clock() + 2 * SETTLED + watched
    payload = {"rate": f"{RATE}/s", "until": until}
    ids = [
        instance.trigger("take-permits", {**payload, "workers": n})["id"]
        for instance, n in zip(instances, crowd, strict=True)
    ]
    eventually(lambda: all(instances[0].run(run_id)["state"] == "running" for run_id in ids))
    time.sleep(max(0.0, until - watched - clock()))
    asked = rate_of_statements(session, watched - 0.1) - idle
    shares = {run["instance"]: run["result"] for run in (instances[0].ended(run_id) for run_id in ids)}
    counted = [[each for each in instants if until - watched <= each < until] for instants in shares.values()]
    total = sum(len(each) for each in counted)
    error = total / watched / RATE - 1
    too_many = excess([each for instants in shares.values() for each in instants], 1 / RATE, 1)
    shared = " ".join(f"{len(each) / total:.0%}" for each in counted)
    print(
        f"{'+'.join(map(str, crowd)):>12} who ask: {total / watched:8,.1f}/s, error {error:+.2%} "
        f"(≤ {ERROR_MOST:.0%}: {verdict(abs(error) <= ERROR_MOST)}); too many: {too_many:.0f}; "
        f"{asked:.0f} statements/s (≤ {STATEMENTS_MOST}: {verdict(asked <= STATEMENTS_MOST)}); "
        f"share of each: {shared}",
        flush=True,
    )


def rate_of_statements(session: psycopg.Connection[tuple[object, ...]], seconds: float) -> float:
    before, began = statements(session), time.monotonic()
    time.sleep(seconds)
    return (statements(session) - before) / (time.monotonic() - began)
