"""From SIGKILL of an instance until its row is `gone`, and until there is a new leader, as PostgreSQL shows them.

The instances are real processes on the embedded PostgreSQL 18, as the tests start it. The clock starts just before the
signal is sent, and stops when a query that is repeated without pause sees the change.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psycopg

from app.fleet.cluster.registry import Registry, Session
from app.fleet.db.namespace import Namespace
from benchmarks.conditions import start_in_waves
from benchmarks.report import distribution, histogram
from tests.support.fleet import Fleet, InstanceProcess
from tests.support.postgres import eventually, server

# How many instances there are, and how many of each kind are killed.
SIZES = ((3, 40), (50, 40))
REGISTRY = Registry(Namespace("flotilla"))
GONE = "SELECT state = 'gone' FROM flotilla.instances WHERE id = %s"
LEADER = """
SELECT i.id FROM flotilla.instances AS i JOIN pg_locks AS l ON l.pid = i.turn_pid
WHERE l.locktype = 'relation' AND l.granted AND l.relation = 'flotilla.leader_turn'::regclass AND i.state <> 'gone'
"""


def run(*, short: bool) -> None:
    for instances, rounds in ((3, 1),) if short else SIZES:
        measure(instances, rounds)


def measure(size: int, rounds: int) -> None:
    with (
        server() as postgres,
        tempfile.TemporaryDirectory() as folder,
        Fleet(postgres.address_of(), Path(folder), FLOTILLA_LOG_LEVEL="warning") as fleet,
        psycopg.connect(postgres.address_of(), autocommit=True) as session,
    ):
        instances = {instance.me()["id"]: instance for instance in start_in_waves(fleet, size)}
        print(f"{size} instances, all ready; {rounds} kills of a follower, {rounds} of the leader\n", flush=True)
        follower = [kill_follower(session, fleet, instances) for _ in range(rounds)]
        gone, led = zip(*(kill_leader(session, fleet, instances) for _ in range(rounds)), strict=True)
    print(distribution("SIGKILL of a follower → gone", follower, bound_ms=500))
    print(distribution("SIGKILL of the leader → a new leader", led, bound_ms=500))
    print(distribution("SIGKILL of the leader → gone", gone, bound_ms=500))
    print("\n  SIGKILL → gone, followers and leaders:")
    print(histogram([*follower, *gone], width_ms=25), flush=True)
    print()


def kill_follower(session: Session, fleet: Fleet, instances: dict[int, InstanceProcess]) -> float:
    leader = eventually(lambda: leader_id(session))
    victim = next(each for each in instances if each != leader)
    began = time.monotonic()
    instances[victim].kill()
    seconds = until(lambda: session.execute(GONE, [victim]).fetchone() == (True,), began)
    replace(fleet, instances, victim)
    return seconds


def kill_leader(session: Session, fleet: Fleet, instances: dict[int, InstanceProcess]) -> tuple[float, float]:
    victim = eventually(lambda: leader_id(session))
    began = time.monotonic()
    instances[victim].kill()
    led = until(lambda: leader_id(session) not in {None, victim}, began)
    gone = until(lambda: session.execute(GONE, [victim]).fetchone() == (True,), began)
    replace(fleet, instances, victim)
    return gone, led


def leader_id(session: Session) -> int | None:
    row = session.execute(LEADER).fetchone()
    return None if row is None else int(row[0])


def until(condition: Callable[[], bool], began: float) -> float:
    while not condition():
        if time.monotonic() - began > 30:
            raise TimeoutError("the condition was not met within 30 s")
        time.sleep(0.001)
    return time.monotonic() - began


def replace(fleet: Fleet, instances: dict[int, InstanceProcess], victim: int) -> None:
    """Start an instance in place of the killed one."""
    del instances[victim]
    (instance,) = fleet.start()
    instances[instance.me()["id"]] = instance
