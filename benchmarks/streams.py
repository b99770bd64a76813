"""Streams: how fast events are written, how soon a client of another instance receives them, what many clients cost.

emit       events per second of one process, until the last event is durable, by PostgreSQL's clock
one        from `run.emit` on one instance to a client of another, without other load; all processes of a machine share
           the monotonic clock, and the event carries its time
many       clients of two instances, each following one of many runs that emit all the time; PostgreSQL counts the
           transactions while the number of clients grows; the clients check that their events are complete and in order
memory     of an instance, per client that follows a run without events
"""

import asyncio
import json
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from benchmarks.conditions import started_instances
from benchmarks.report import distribution, verdict
from tests.support.fleet import InstanceProcess
from tests.support.postgres import Postgres, eventually

EMIT = (10, 10_000)
MIN_RATE = 20_000
SAMPLES = 400
PAUSE = 0.05
ONE_MEDIAN, ONE_P99 = 8, 30
RUNS = 200
EACH_SECOND = 2
CLIENTS = (200, 500, 1000, 2000)
WATCHED = 15.0
MANY_P99 = 250
IDLE = 1000
MAX_IDLE_KB = 60
FILES = 8192


def run(*, short: bool) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, most) if most > 0 else FILES, most))
    share = 0.02 if short else 1.0
    with started_instances(2, FLOTILLA_CONCURRENCY="500") as (postgres, _, instances):
        emit(postgres, instances, share)
        asyncio.run(one(instances, max(10, int(SAMPLES * share))))
        asyncio.run(memory(instances, max(20, int(IDLE * share))))
        runs, clients, watched = (2, (4,), 1.0) if short else (RUNS, CLIENTS, WATCHED)
        asyncio.run(many(postgres, instances, runs, clients, watched))


def emit(postgres: Postgres, instances: Sequence[InstanceProcess], share: float) -> None:
    runs, events = EMIT
    events = int(events * share)
    # Only one process is measured: the other one must not claim.
    instances[1].freeze()
    ids = instances[0].trigger_all([{"action": "talk", "payload": {"events": events}}] * runs)
    for run_id in ids:
        instances[0].ended(run_id, within=120)
    instances[1].thaw()
    with postgres.session("postgres") as session:
        row = session.execute(
            "SELECT extract(epoch FROM max(finished_at) - min(started_at)) FROM flotilla.finished_runs "
            "WHERE id = ANY (%s) AND state = 'succeeded' AND events = %s",
            [ids, events + 3],
        ).fetchone()
    assert row is not None
    rate = runs * events / float(row[0])
    print(f"{'run.emit, one process':<38} {rate:>8,.0f} events/s   ≥ {MIN_RATE:,}/s: {verdict(rate >= MIN_RATE)}")


# -- clients ----------------------------------------------------------------------------------------------------------


@dataclass
class Client:
    """Follows a run, and records how late its events arrive."""

    instance: InstanceProcess
    run_id: int
    late: list[float] = field(default_factory=list)
    seq: int = 0
    in_order: bool = True
    task: "asyncio.Task[None] | None" = None

    async def follow(self, ready: asyncio.Semaphore) -> None:
        async with ready:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.instance.port, limit=2**20)
            writer.write(f"GET /runs/{self.run_id}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(status.decode())
        try:
            while line := await reader.readline():
                now = time.monotonic_ns()
                if line.startswith(b"data: "):
                    self.receive(json.loads(line[6:]), now)
        finally:
            writer.close()

    def receive(self, event: dict[str, object], now: int) -> None:
        if event.get("kind") is None:
            return
        self.in_order = self.in_order and event["seq"] == self.seq + 1
        self.seq = int(str(event["seq"]))
        if event["kind"] == "tick" and isinstance(event["data"], int):
            self.late.append((now - event["data"]) / 1e9)


async def start_following(clients: Sequence[Client]) -> None:
    ready = asyncio.Semaphore(50)
    for client in clients:
        client.task = asyncio.create_task(client.follow(ready))
    while not all(client.seq for client in clients):
        await asyncio.sleep(0.05)
        for client in clients:
            if client.task is not None and client.task.done():
                client.task.result()


async def stop_following(clients: Sequence[Client]) -> None:
    for client in clients:
        if client.task is not None:
            client.task.cancel()
    await asyncio.gather(*(client.task for client in clients if client.task is not None), return_exceptions=True)


async def one(instances: Sequence[InstanceProcess], samples: int) -> None:
    run_id = instances[0].trigger("tick", {"events": samples, "pause": PAUSE})["id"]
    name = await asyncio.to_thread(eventually, lambda: instances[0].run(run_id)["instance"])
    (other,) = [instance for instance in instances if instance.me()["name"] != name]
    client = Client(other, run_id)
    await start_following([client])
    await asyncio.to_thread(eventually, lambda: len(client.late) > samples * 0.9, within=120)
    await stop_following([client])
    # The first events were emitted before the client had connected.
    print(distribution("emit → a client elsewhere, idle", client.late[5:], median_ms=ONE_MEDIAN, bound_ms=ONE_P99))


async def memory(instances: Sequence[InstanceProcess], count: int) -> None:
    instance = instances[0]
    run_id = instance.trigger("linger-quietly")["id"]
    warm = [Client(instance, run_id) for _ in range(20)]
    await start_following(warm)
    before = resident(instance.pid)
    clients = [Client(instance, run_id) for _ in range(count)]
    await start_following(clients)
    each = (resident(instance.pid) - before) / count
    await stop_following([*warm, *clients])
    instance.client.post(f"/runs/{run_id}/cancel")
    kept = verdict(each <= MAX_IDLE_KB * 1024)
    print(f"{'memory of an idle client':<38} {each / 1024:8.1f} KB   ≤ {MAX_IDLE_KB} KB: {kept}")


def resident(pid: int) -> int:
    """Return the bytes of memory that only this process uses."""
    found = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line[1]) * 1024 for line in found if line[0] in {"Private_Clean:", "Private_Dirty:"})


async def many(
    postgres: Postgres, instances: Sequence[InstanceProcess], runs: int, numbers: Sequence[int], watched: float
) -> None:
    pause = 1 / EACH_SECOND
    ids = instances[0].trigger_all([{"action": "tick", "payload": {"events": 1_000_000, "pause": pause}}] * runs)
    clients: list[Client] = []
    complete = True
    with postgres.session("postgres") as session:
        for number in numbers:
            more = [
                Client(instances[index % len(instances)], ids[index // len(instances) % runs])
                for index in range(len(clients), number)
            ]
            await start_following(more)
            clients += more
            await asyncio.sleep(min(2.0, watched))
            for client in clients:
                client.late.clear()
            before, began = statements(session), time.monotonic()
            await asyncio.sleep(watched)
            seconds = time.monotonic() - began
            cost = (statements(session) - before) / seconds
            late = [each for client in clients for each in client.late]
            complete = complete and all(client.in_order and client.late for client in clients)
            bound = MANY_P99 if number == max(numbers) else None
            print(distribution(f"{number} clients, {len(late) / seconds:.0f}/s", late, bound_ms=bound), end="")
            print(f"   {cost:.0f} transactions/s", flush=True)
    await stop_following(clients)
    for run_id in ids:
        instances[0].client.post(f"/runs/{run_id}/cancel")
    print(f"complete and in order for each client: {verdict(complete)}")


def statements(session: psycopg.Connection[tuple[object, ...]]) -> int:
    session.execute("SELECT pg_stat_force_next_flush()")
    row = session.execute("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert row is not None
    return int(str(row[0]))
