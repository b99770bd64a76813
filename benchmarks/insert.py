"""How fast runs can be inserted: over REST in batches of 1,000, and in code with `trigger_many`.

REST: two clients, each a thread with its own connection, and one real server process. The payloads have three fields.
The clients parse the answers only after the clock has stopped. In code: two tasks that call `trigger_many` with 1,000
orders at a time, in a service in this process, with uvloop. The action is paused, so that no run is executed meanwhile,
and the rows are counted at the end.
"""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import psycopg
import uvloop

from app.fleet import Order, trigger_many
from benchmarks.conditions import ACTIONS, started_instances
from benchmarks.latency import JSON, connect, request
from benchmarks.report import rates
from tests.support.fleet import InstanceProcess
from tests.support.service import service

ROUNDS = 5
CLIENTS = 2
BATCH = 1000
REST_RUNS = 60_000
MIN_REST_RATE = 20_000
CODE_RUNS = 200_000
MIN_CODE_RATE = 80_000
PAUSE = "/actions/noop/pause"


def run(*, short: bool) -> None:
    rounds, share = (1, 0.1) if short else (ROUNDS, 1.0)
    with started_instances(1) as (postgres, _, (instance,)):
        rest = over_rest(postgres.address_of(), instance, rounds, int(REST_RUNS * share))
        instance.end()
        code = uvloop.run(in_code(postgres.new_database(), rounds, int(CODE_RUNS * share)))
    print(f"{'':<46} runs/s in each of {rounds} rounds")
    print(rates("POST /runs:batch, 1,000 each, two clients", rest, least=MIN_REST_RATE))
    print(rates("trigger_many, 1,000 each, two tasks", code, least=MIN_CODE_RATE))


def over_rest(address: str, instance: InstanceProcess, rounds: int, runs: int) -> list[float]:
    each = runs // CLIENTS // BATCH
    orders = [{"action": "noop", "payload": {"number": n, "name": "Flotilla", "ok": True}} for n in range(BATCH)]
    body = json.dumps({"runs": orders}).encode()
    connections = [connect(instance) for _ in range(CLIENTS)]
    request(connections[0], "POST", PAUSE, 200)
    measured = []
    with ThreadPoolExecutor(CLIENTS) as threads:
        for _ in range(rounds):
            before = count(address)
            began = time.perf_counter()
            sent = [threads.submit(send, connection, body, each) for connection in connections]
            answered = [client.result() for client in sent]
            measured.append(runs / (time.perf_counter() - began))
            check(address, before + runs)
            if any(len(json.loads(answer)["runs"]) != BATCH for answer in answered):
                raise RuntimeError("an answer does not have every run")
    for connection in connections:
        connection.close()
    return measured


def send(connection: HTTPConnection, body: bytes, times: int) -> bytes:
    """Send a batch several times, one after another; return the last answer."""
    answer = b""
    for _ in range(times):
        connection.request("POST", "/runs:batch", body=body, headers=JSON)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 202:
            raise RuntimeError(f"{response.status} {answer.decode(errors='replace')}")
    return answer


async def in_code(address: str, rounds: int, runs: int) -> list[float]:
    each = runs // CLIENTS // BATCH
    orders = [Order("noop")] * BATCH
    measured = []
    async with service(address, actions=(ACTIONS,), log_level="warning") as running:
        (await running.client.post(PAUSE)).raise_for_status()

        async def task() -> None:
            for _ in range(each):
                await trigger_many(orders)

        for _ in range(rounds):
            before = count(address)
            began = time.perf_counter()
            await asyncio.gather(*(task() for _ in range(CLIENTS)))
            measured.append(runs / (time.perf_counter() - began))
            check(address, before + runs)
    return measured


def count(address: str) -> int:
    with psycopg.connect(address) as session:
        row = session.execute("SELECT count(*) FROM flotilla.runs").fetchone()
    return row[0] if row else 0


def check(address: str, expected: int) -> None:
    if (found := count(address)) != expected:
        raise RuntimeError(f"there are {found} runs, but {expected} were inserted")
