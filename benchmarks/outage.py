"""How soon all instances are ready again, after PostgreSQL was stopped and started; how soon a frozen instance is gone.

The clock of an outage starts when PostgreSQL accepts connections again. All instances must become ready with the ids
they had, and no instance may have been declared gone.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psycopg

from benchmarks.report import distribution
from tests.support.fleet import Fleet, InstanceProcess, by_name, leader_of
from tests.support.postgres import Postgres, server

INSTANCES = 3
AWAY = (1.0, 5.0, 20.0)
FREEZES = 5


def run(*, short: bool) -> None:
    with (
        server() as postgres,
        tempfile.TemporaryDirectory() as folder,
        Fleet(postgres.address_of(), Path(folder)) as fleet,
    ):
        instances = fleet.start(INSTANCES)
        leader_of(instances)
        for away in AWAY[:1] if short else AWAY:
            one_outage(postgres, instances, away)
        # Each takes as long as the lease. The short form skips it, because tests cover it.
        seconds = [] if short else [freeze(instances) for _ in range(FREEZES)]
    if seconds:
        print(distribution("SIGSTOP → gone (the server's lease)", seconds, bound_ms=7000))


def one_outage(postgres: Postgres, instances: list[InstanceProcess], away: float) -> None:
    before = [instance.me()["id"] for instance in instances]
    postgres.stop("immediate")
    time.sleep(away)
    postgres.start_again()
    until(lambda: answers(postgres))
    ready = until(lambda: all(instance.status() == 200 for instance in instances))
    same = [instance.me()["id"] for instance in instances] == before
    false_deaths = sum(len(instance.lines("instance.gone")) for instance in instances)
    print(
        f"PostgreSQL away {away:4.0f} s → all {len(instances)} ready {ready:5.2f} s after it accepts connections "
        f"(≤ 3 s: {'kept' if ready <= 3 else 'NOT KEPT'}); same ids: {same}; false deaths: {false_deaths}",
        flush=True,
    )


def freeze(instances: list[InstanceProcess]) -> float:
    """Freeze a follower until it is declared gone, then thaw it and wait until it has rejoined."""
    leader = leader_of(instances)
    victim = next(instance for instance in instances if instance is not leader)
    me = victim.me()
    victim.freeze()
    try:
        return until(lambda: by_name(leader.instances())[me["name"]]["state"] == "gone")
    finally:
        victim.thaw()
        until(lambda: victim.status() == 200 and victim.me()["id"] != me["id"])


def answers(postgres: Postgres) -> bool:
    try:
        with psycopg.connect(postgres.address_of(), connect_timeout=2):
            return True
    except psycopg.OperationalError:
        return False


def until(condition: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > 60:
            raise TimeoutError("the condition was not met within 60 s")
        time.sleep(0.01)
    return time.monotonic() - began
