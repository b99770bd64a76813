"""Compares the time of a claim with ten million finished runs, and with a snapshot held open, to one on empty tables.

The service runs in this process, with uvloop and its own executor. pgbench triggers runs at a steady rate (with the
engine's own statement, one per transaction), and the executor's call that claims is timed. There are three databases on
one server, each with its own service:

    empty       no other runs
    snapshot    a transaction takes a snapshot before the first run and holds it to the end, so that no claimed or moved
                row can be removed from the hot table and its indexes
    finished    ten million finished runs

The databases take turns of a few seconds, so that other load on the machine affects all three alike. For the snapshot,
the last quarter is also compared alone, because most dead rows exist then.
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
from app.fleet.db.pool.pool import Connection
from app.fleet.engine.dispatch.backlog import DueQueue
from app.fleet.engine.dispatch.claimant import Claimant
from app.fleet.runs.insert import INSERT
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
MAX_RATIO = 1.5
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
    """The executor's claimant; it records how long each claim takes."""

    seconds: list[float]

    async def claim(
        self, connection: Connection, me: Identity, due: Sequence[DueQueue], room: int, now: float
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
    """Format how many times longer a claim takes than on empty tables."""
    p50, p99 = (percentile(seconds, share) / percentile(empty, share) for share in (0.5, 0.99))
    kept = verdict(max(p50, p99) <= MAX_RATIO)
    return f"{label + ', against empty':<38} p50 × {p50:.2f}  p99 × {p99:.2f}   ≤ {MAX_RATIO}: {kept}"


async def measure(postgres: Postgres, folder: Path, finished: int, turns: int, seconds: int) -> dict[str, list[float]]:
    """Return the seconds of each claim, in the order of the claims."""
    addresses = {name: postgres.new_database() for name in ("empty", "snapshot", "finished")}
    async with AsyncExitStack() as stack:
        subjects = {
            name: Subject(address, await stack.enter_async_context(running(address)), folder / f"{name}.sql")
            for name, address in addresses.items()
        }
        await asyncio.gather(*(subject.under_load(postgres, WARM_UP) for subject in subjects.values()))
        began = time.monotonic()
        await subjects["finished"].fill(finished)
        print(f"{finished:,} finished runs inserted within {time.monotonic() - began:.0f} s", flush=True)
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
    """A database, its service with timed claims, and the script that triggers runs in it."""

    def __init__(self, address: str, running: Running, script: Path) -> None:
        engine = running.context.engine
        self._address = address
        self._action_id = engine.catalogue.id_of("noop")
        self._claimant = Timed(NAMESPACE, engine.catalogue, engine.backlog, engine.clock)
        self._claimant.seconds = []
        engine.dispatcher._claimant = self._claimant  # noqa: SLF001 — the benchmark times its claims
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
            "triggered_by": None,
            "request_id": None,
            "trace_parent": None,
        }
        with psycopg.connect(address) as session:
            statement = psycopg.ClientCursor(session).mogrify(NAMESPACE.sql(INSERT), values)
        script.write_text(statement.strip() + ";\n")

    async def under_load(self, postgres: Postgres, seconds: int) -> list[float]:
        """Trigger runs at the rate for some seconds; return the seconds of each claim."""
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
