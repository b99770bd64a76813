"""From the trigger to the start of the action, over REST, on an idle cluster of three.

Two clocks. PostgreSQL's clock: `started_at` minus `created_at` of the run, as GET /runs/{id} shows it. The client's
clock: from just before the request is sent until the first statement of the action, in whichever process. The second
includes everything, and the bar applies to it.

The samples have random intervals and are spread over the instances. The connections are already open.
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
INTERVAL = (0.020, 0.060)
MAX_MEDIAN_MS = 5
MAX_P99_MS = 20


def run(*, short: bool) -> None:
    samples = 30 if short else SAMPLES
    with Marks() as marks, started_instances(INSTANCES, **marks.env) as (_, _, instances):
        connections = [connect(instance) for instance in instances]
        sent = {}
        for number in range(samples + WARM_UP):
            time.sleep(random.uniform(*INTERVAL))
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
    print(distribution("before POST → the action began", whole, median_ms=MAX_MEDIAN_MS, bound_ms=MAX_P99_MS))
    print(distribution("created_at → started_at", claimed, median_ms=MAX_MEDIAN_MS, bound_ms=MAX_P99_MS))


def connect(instance: InstanceProcess) -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", instance.port, timeout=30)
    connection.connect()
    return connection


def trigger(connection: HTTPConnection, action: str) -> int:
    return int(request(connection, "POST", f"/actions/{action}/runs", 202)["id"])


def request(connection: HTTPConnection, method: str, path: str, expected: int) -> Any:
    connection.request(method, path, body="{}" if method == "POST" else None, headers=JSON)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != expected:
        raise RuntimeError(f"{method} {path}: {answer.status} {body.decode(errors='replace')}")
    return json.loads(body)


JSON = {"Content-Type": "application/json"}


def seconds_to_claim(connection: HTTPConnection, identifier: int) -> float:
    found = request(connection, "GET", f"/runs/{identifier}", 200)
    waited = datetime.fromisoformat(found["started_at"]) - datetime.fromisoformat(found["created_at"])
    return float(waited.total_seconds())
