"""Locks: the cost without contention, the time of a hand-over under contention, the cost of holding many, singletons.

Uncontended: one task of one of three instances enters `async with lock(…)` with an empty body, again and again.

Contended: a hundred runs on three instances acquire the same lock again and again. A hand-over lasts from just before
a holder releases the lock until the body of the next holder begins, on whichever instance; all processes share the
monotonic clock. Fairness is the number of other turns between two turns of the same run: 99 if the queue is FIFO.

Singletons: from the signal to the instance that runs a singleton until the singleton begins on another instance, for
SIGKILL and for SIGTERM.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.conditions import ACTIONS, started_instances
from benchmarks.marks import Marks
from benchmarks.report import distribution, percentile, verdict
from tests.support.fleet import Fleet, InstanceProcess

INSTANCES = 3
SAMPLES = 1000
CONTENDERS = 100
TURNS = 20
MANY = 1000
WATCHED = 10.0
MEDIAN_ALONE = 2
P99_CONTENDED = 20
ENDS = 20
P99_TAKEN_OVER = 500
P99_HANDED_OVER = 1000
WITH_BEACON = f"{ACTIONS},benchmarks.beacon"
RENEWED, BEATEN = "SET renewed_at = clock_timestamp()", "SET heartbeat_at = clock_timestamp(), state"


def run(*, short: bool) -> None:
    samples, contenders, turns, many, watched, ends = (
        (20, 6, 3, 20, 2.0, 1) if short else (SAMPLES, CONTENDERS, TURNS, MANY, WATCHED, ENDS)
    )
    with started_instances(INSTANCES) as (_, _, instances):
        print(distribution("uncontended, taken and released", alone(instances[0], samples), median_ms=MEDIAN_ALONE))
        all_turns = contended(instances, contenders, turns)
        handed_over = [(begun - ended) / 1e9 for (_, ended, _), (begun, _, _) in pairwise(all_turns)]
        label = f"{contenders} contenders, handed over"
        print(distribution(label, handed_over, bound_ms=P99_CONTENDED))
        print(f"{'others between two turns of one':<38} {fairness(all_turns)}")
    with started_instances(1) as (postgres, _, (instance,)):
        with postgres.session() as session:
            session.execute("ALTER SYSTEM SET log_statement = 'all'")
            session.execute("SELECT pg_reload_conf()")
        held = instance.trigger("hold-many", {"locks": many, "seconds": watched + 30})
        while len(instance.client.get("/locks").json()["items"]) < many:
            time.sleep(0.1)
        before = postgres.log.read_text(errors="replace")
        time.sleep(watched)
        log = postgres.log.read_text(errors="replace")[len(before) :]
        instance.client.post(f"/runs/{held['id']}/cancel")
    renewals, beats = log.count(RENEWED), log.count(BEATEN)
    one = verdict(abs(renewals - beats) <= 1)
    print(f"{many:,} locks held: {renewals} renewals at {beats} heartbeats   one statement per heartbeat: {one}")

    with (
        Marks() as marks,
        started_instances(INSTANCES, **marks.env, FLOTILLA_ACTIONS=WITH_BEACON) as (_, fleet, instances),
    ):
        killed = [seconds_to_move(marks, fleet, instances, InstanceProcess.kill) for _ in range(ends)]
        left = [seconds_to_move(marks, fleet, instances, InstanceProcess.terminate) for _ in range(ends)]
    print(distribution("a singleton's instance is killed", killed, bound_ms=P99_TAKEN_OVER))
    print(distribution("a singleton's instance is to leave", left, bound_ms=P99_HANDED_OVER))


def seconds_to_move(
    marks: Marks, fleet: Fleet, instances: list[InstanceProcess], end: Callable[[InstanceProcess], None]
) -> float:
    """End the instance that runs the singleton, wait until it begins elsewhere, and replace that instance."""
    running = marks.wait(lambda mark: mark.pid in {instance.pid for instance in instances})
    owner = next(instance for instance in instances if instance.pid == running.pid)
    began = time.monotonic_ns()
    end(owner)
    moved = marks.wait(lambda mark: mark.run > running.run)
    instances.remove(owner)
    instances.append(fleet.launch().wait_ready())
    return (moved.monotonic - began) / 1e9


def alone(instance: InstanceProcess, samples: int) -> list[float]:
    run_id = instance.trigger("lock-alone", {"samples": samples})["id"]
    seconds: list[float] = instance.ended(run_id, within=120)["result"]
    return seconds


# When a turn began and ended, and the run that had it.
Turn = tuple[int, int, int]


def contended(instances: Sequence[InstanceProcess], contenders: int, turns: int) -> list[Turn]:
    """Let all contenders acquire the lock several times, and return all turns in their order."""
    payload = {"turns": turns, "at": time.monotonic() + 3}
    ids = instances[0].trigger_all([{"action": "contend", "payload": payload}] * contenders)
    found: list[Any] = [turns_of(instances[0], run_id) for run_id in ids]
    return sorted(turn for each in found for turn in each)


def turns_of(instance: InstanceProcess, run_id: int) -> list[Turn]:
    return [(begun, ended, run_id) for begun, ended in instance.ended(run_id, within=240)["result"]]


def fairness(turns: Sequence[Turn]) -> str:
    last: dict[int, int] = {}
    between = []
    for position, (_, _, run_id) in enumerate(turns):
        if run_id in last:
            between.append(position - last[run_id] - 1)
        last[run_id] = position
    low, middle, high = min(between), percentile(between, 0.5), max(between)
    return f"at least {low}, median {middle:.0f}, at most {high}"
