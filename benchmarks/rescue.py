"""From SIGKILL of the instance that executes a run until the action begins again on another instance.

There are three real instances. The leader and a follower are killed in turn, at a random moment, and a new instance
replaces the killed one. The clock starts before the signal is sent, and stops at the first statement of the action in
the other process; both use the same monotonic clock.
"""

import random
import time

from benchmarks.conditions import started_instances
from benchmarks.marks import Mark, Marks
from benchmarks.report import distribution, histogram
from tests.support.fleet import InstanceProcess, leader_of

INSTANCES = 3
KILLS = 50
P99 = 500


def run(*, short: bool) -> None:
    kills = 2 if short else KILLS
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with Marks() as marks, started_instances(INSTANCES, **marks.env) as (_, fleet, started):
        instances = list(started)
        for number in range(kills):
            of_leader = number % 2 == 0
            leader = leader_of(instances)
            victim = (
                leader if of_leader else random.choice([instance for instance in instances if instance is not leader])
            )
            seconds[of_leader].append(rescued(instances, victim, marks))
            if number < kills - 1:
                instances.extend(fleet.start())
    print(distribution("SIGKILL of the leader → begun elsewhere", seconds[True]))
    print(distribution("SIGKILL of a follower → begun elsewhere", seconds[False]))
    print(distribution("SIGKILL → begun elsewhere", seconds[True] + seconds[False], bound_ms=P99))
    print("\n  both together:")
    print(histogram(seconds[True] + seconds[False], width_ms=25))


def rescued(instances: list[InstanceProcess], victim: InstanceProcess, marks: Marks) -> float:
    identifier = running_on(victim, marks)
    time.sleep(random.random())
    began = time.monotonic_ns()
    victim.kill()
    instances.remove(victim)
    mark = marks.wait(lambda mark: mark.run == identifier and mark.pid != victim.pid)
    cancel(instances[0], identifier)
    return (mark.monotonic - began) / 1e9


def running_on(victim: InstanceProcess, marks: Marks) -> int:
    """Trigger runs until the victim claims one; cancel the others. Return the id of that run."""
    while True:
        identifier = int(victim.trigger("linger")["id"])
        if begun(marks, identifier).pid == victim.pid:
            return identifier
        cancel(victim, identifier)


def begun(marks: Marks, identifier: int) -> Mark:
    return marks.wait(lambda mark: mark.run == identifier)


def cancel(instance: InstanceProcess, identifier: int) -> None:
    answer = instance.client.post(f"/runs/{identifier}/cancel")
    if answer.status_code not in {200, 202}:
        raise RuntimeError(f"run {identifier} was not cancelled: {answer.status_code} {answer.text}")
