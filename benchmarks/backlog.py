"""Is claiming as fast with ten million finished runs, and under a snapshot somebody holds, as on empty tables?

The service in this process, with uvloop, and its own executor at its own work: pgbench triggers a run at a steady rate
(the engine's own statement, each in a transaction), and each claim is timed around the call the executor makes. Three
databases on one server, a service for each:

    empty       nothing but these runs
    snapshot    a transaction that took a snapshot before the first run, and holds it to the end: nothing that was
                claimed or has left is removed from the hot table and its indexes meanwhile
    finished    ten million finished runs

They take turns of a few seconds, so that whatever else the machine does is the same for all. For the snapshot,
the last quarter is compared on its own too, when most has piled up.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import psycopg
import uvloop

from app.fleet.cluster.registry import Identity
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool import Connection
from app.fleet.engine.dispatch.claim import Claimant, Place, Queue
from app.fleet.engine.enqueue.trigger import INSERT
from benchmarks.conditions import ACTIONS, durable_server
from benchmarks.report import distribution, percentile, verdict
from benchmarks.throughput import pgbench
from tests.support.postgres import Postgres
from tests.support.service import Running, service

FINISHED = 10_000_000
RATE = 500
TURNS = 12
SECONDS = 5
WARM_UP = 1
MOST = 1.5
NAMESPACE = Namespace("flotilla")

FILL = """
INSERT INTO flotilla.finished_runs (
    id, action_id, state, priority, run_at, token, instance, attempt, max_attempts, trigger, events, created_at,
    started_at, finished_at, expires_at
)
SELECT nextval('flotilla.runs_id_seq'), %(action)s, 'succeeded', 0, now(), 1, 'flotilla-1', 1, 4, 'code', 0, now(),
       now(), now(), now() + interval '7 days'
FROM generate_series(1, %(rows)s)
"""


class Timed(Claimant):
    """The executor's claimant, with a clock around it."""

    seconds: list[float]

    async def claim(
        self, connection: Connection, me: Identity, due: Sequence[tuple[Place, Queue]], room: int, now: float
    ) -> list[tuple[Any, ...]]:
        began = time.perf_counter()
        try:
            return await super().claim(connection, me, due, room, now)
        finally:
            self.seconds.append(time.perf_counter() - began)


def run(*, short: bool) -> None:
    finished, turns, seconds = (20_000, 1, 1) if short else (FINISHED, TURNS, SECONDS)
    with durable_server() as postgres, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        measured = uvloop.run(measure(postgres, folder, finished, turns, seconds))
    print(f"{RATE} runs/s for {turns * seconds} s each, in turns of {seconds} s\n")
    empty = measured["empty"]
    for label, each in measured.items():
        print(distribution(f"claim, {label}", each))
    print(against("snapshot", measured["snapshot"], empty))
    print(against("snapshot, last quarter", last_quarter(measured["snapshot"]), last_quarter(empty)))
    print(against(f"{finished:,} finished", measured["finished"], empty))


def last_quarter(seconds: Sequence[float]) -> Sequence[float]:
    return seconds[len(seconds) * 3 // 4 :]


def against(label: str, seconds: Sequence[float], empty: Sequence[float]) -> str:
    """Say how many times as long a claim takes."""
    p50, p99 = (percentile(seconds, share) / percentile(empty, share) for share in (0.5, 0.99))
    return (
        f"{label + ', against empty':<38} p50 × {p50:.2f}  p99 × {p99:.2f}   ≤ {MOST}: {verdict(max(p50, p99) <= MOST)}"
    )


async def measure(postgres: Postgres, folder: Path, finished: int, turns: int, seconds: int) -> dict[str, list[float]]:
    """Return how long each claim took, in the order in which they were made."""
    addresses = {name: postgres.new_database() for name in ("empty", "snapshot", "finished")}
    async with AsyncExitStack() as stack:
        subjects = {
            name: Subject(address, await stack.enter_async_context(running(address)), folder / f"{name}.sql")
            for name, address in addresses.items()
        }
        await asyncio.gather(*(subject.under_load(postgres, WARM_UP) for subject in subjects.values()))
        began = time.monotonic()
        await subjects["finished"].fill(finished)
        print(f"{finished:,} finished runs put in within {time.monotonic() - began:.0f} s", flush=True)
        for subject in subjects.values():
            subject.settle()
        holder = stack.enter_context(psycopg.connect(addresses["snapshot"]))
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM flotilla.runs")
        measured: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(turns):
            for name, subject in subjects.items():
                measured[name] += await subject.under_load(postgres, seconds)
    return measured


def running(address: str) -> AbstractAsyncContextManager[Running]:
    return service(address, actions=(ACTIONS,), log_level="warning")


class Subject:
    """A database, the service on it with its claims timed, and the script that triggers runs there."""

    def __init__(self, address: str, running: Running, script: Path) -> None:
        engine = running.context.engine
        self._address = address
        self._action_id = engine.catalogue.id_of("noop")
        self._claimant = Timed(NAMESPACE, engine.catalogue, engine.executor.claimant.clock)
        self._claimant.seconds = []
        engine.executor.claimant = self._claimant
        self._script = script
        action = engine.catalogue["noop"]
        values = {
            "actions": [self._action_id],
            "priorities": [action.priority],
            "run_ats": [None],
            "max_attempts": [action.max_attempts],
            "payloads": [None],
            "trigger": "code",
            "mark": None,
        }
        with psycopg.connect(address) as session:
            statement = psycopg.ClientCursor(session).mogrify(NAMESPACE.sql(INSERT), values)
        script.write_text(statement.strip() + ";\n")

    async def under_load(self, postgres: Postgres, seconds: int) -> list[float]:
        """Trigger at the rate for so long; return how long each claim took."""
        self._claimant.seconds = []
        database = self._address.rpartition("/")[2]
        options = ("-c", "2", "-R", str(RATE), "-T", str(seconds))
        await asyncio.to_thread(pgbench, postgres, database, self._script, *options)
        return self._claimant.seconds

    async def fill(self, rows: int) -> None:
        async with await psycopg.AsyncConnection.connect(self._address) as session:
            await session.execute(FILL, {"action": self._action_id, "rows": rows})

    def settle(self) -> None:
        with psycopg.connect(self._address, autocommit=True) as session:
            session.execute("VACUUM ANALYZE")
            session.execute("CHECKPOINT")
