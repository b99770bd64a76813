"""From the trigger to the start of the action, on an idle cluster of three, through REST.

Two clocks. PostgreSQL's: `started_at` minus `created_at` of the run, as GET /runs/{id} shows it. The client's: from
the moment before the request is sent until the action's first statement runs, in whichever process that is; this one
has everything in it, and is the one with the bar.

The samples are at random distances and spread over the instances, each over a connection that is open already.
"""

import json
import random
import time
from datetime import datetime
from http.client import HTTPConnection
from typing import Any

from benchmarks.conditions import started_instances
from benchmarks.marks import Marks
from benchmarks.report import distribution
from tests.support.fleet import InstanceProcess
from tests.support.postgres import eventually

INSTANCES = 3
SAMPLES = 600
WARM_UP = 20
APART = (0.020, 0.060)
MEDIAN = 5
P99 = 20


def run(*, short: bool) -> None:
    samples = 30 if short else SAMPLES
    with Marks() as marks, started_instances(INSTANCES, **marks.env) as (_, _, instances):
        connections = [connected(instance) for instance in instances]
        sent = {}
        for number in range(samples + WARM_UP):
            time.sleep(random.uniform(*APART))
            connection = random.choice(connections)
            began = time.monotonic_ns()
            identifier = trigger(connection, "mark")
            if number >= WARM_UP:
                sent[identifier] = began
        eventually(lambda: sent.keys() <= {mark.run for mark in marks.all()})
        started = {mark.run: mark.monotonic for mark in marks.all()}
        claimed = [seconds_to_claim(connections[0], identifier) for identifier in sent]
        for connection in connections:
            connection.close()
    whole = [(started[identifier] - began) / 1e9 for identifier, began in sent.items()]
    print(distribution("before POST → the action began", whole, median_ms=MEDIAN, bound_ms=P99))
    print(distribution("created_at → started_at", claimed, median_ms=MEDIAN, bound_ms=P99))


def connected(instance: InstanceProcess) -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", instance.port, timeout=30)
    connection.connect()
    return connection


def trigger(connection: HTTPConnection, action: str) -> int:
    return int(asked(connection, "POST", f"/actions/{action}/runs", 202)["id"])


def asked(connection: HTTPConnection, method: str, path: str, expected: int) -> Any:
    connection.request(method, path, body="{}" if method == "POST" else None, headers=JSON)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != expected:
        raise RuntimeError(f"{method} {path}: {answer.status} {body.decode(errors='replace')}")
    return json.loads(body)


JSON = {"Content-Type": "application/json"}


def seconds_to_claim(connection: HTTPConnection, identifier: int) -> float:
    found = asked(connection, "GET", f"/runs/{identifier}", 200)
    taken = datetime.fromisoformat(found["started_at"]) - datetime.fromisoformat(found["created_at"])
    return float(taken.total_seconds())
