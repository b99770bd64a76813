"""Tools for tests of runs: trigger a run, read it, wait until it has ended."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from app.fleet import Run
from app.fleet.engine.engine import Engine
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.execute.attempt import Attempt
from app.fleet.runs.read import records
from app.fleet.runs.read.records import RunRecord
from tests.support.postgres import BOUND
from tests.support.service import Running, service

Answer = TypeVar("Answer")
ENDED = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class LocalInstance:
    """One instance in this process, and its runs."""

    running: Running

    @property
    def engine(self) -> Engine:
        return self.running.context.engine

    @contextmanager
    def without_comparison(self) -> Iterator[None]:
        """Disable the comparison of the reconciler for the duration of the block: it would stop a taken-over run."""

        async def compare_nothing(*_: object) -> None: ...

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.engine.reconciler, "_compare", compare_nothing)
            yield

    async def wait_for_leader(self) -> None:
        """Wait until there is a leader, because its absence is an anomaly."""

        async def has_leader() -> bool:
            view = (await self.running.client.get("/health/instances")).json()
            return "no_leader" not in [each["kind"] for each in view["anomalies"]]

        await soon(has_leader)

    async def trigger(self, action: str, payload: Any = None, **order: Any) -> int:
        (done,) = await self.engine.triggers.trigger([Order(action, payload, **order)])
        return done.id

    async def trigger_all(self, orders: Sequence[Order]) -> list[int]:
        return [done.id for done in await self.engine.triggers.trigger(orders)]

    async def read(self, run_id: int) -> RunRecord:
        database = self.running.context.database
        await self.wait_until_healthy()
        async with database.connection() as connection:
            return await records.find(connection, database.namespace, run_id)

    async def ended(self, run_id: int, within: float = BOUND) -> RunRecord:
        return await self.until(run_id, *ENDED, within=within)

    async def until(self, run_id: int, *states: str, within: float = BOUND) -> RunRecord:
        async def find() -> RunRecord | None:
            run = await self.read(run_id)
            return run if run.state in states else None

        return await soon(find, within=within)

    async def attempt(self, run_id: int) -> Attempt:
        """Wait until the run is under way here, and return its attempt. Its row is `running` a moment earlier."""

        async def find() -> Attempt | None:
            return self.engine.executor.attempts.get(run_id)

        return await soon(find)

    async def handle(self, run_id: int) -> Run[Any]:
        """Wait until the run is under way here, and return a handle of its attempt, as its action has one."""
        return Run(await self.attempt(run_id))

    async def wait_until_healthy(self) -> None:
        """Wait for the end of an outage. The pool waits for a second only, and on a busy machine it may last longer."""
        await self.running.context.database._supervisor.wait_until_healthy()

    async def run(self, action: str, payload: Any = None, **order: Any) -> RunRecord:
        """Trigger a run, and return it when it has ended."""
        return await self.ended(await self.trigger(action, payload, **order))

    async def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Execute a statement, with the namespace's schema in the search path."""
        await self.wait_until_healthy()
        async with self.running.context.database.connection() as connection:
            await connection.execute("SET LOCAL search_path TO flotilla, public")
            cursor = await connection.execute(statement, values or None)
            return await cursor.fetchall() if cursor.description else []


@asynccontextmanager
async def local_instance(address: str, **settings: Any) -> AsyncIterator[LocalInstance]:
    given = {"actions": ("tests.support.trial_actions",), "log_level": "warning", **settings}
    async with service(address, **given) as running:
        yield LocalInstance(running)


async def soon(
    condition: Callable[[], Awaitable[Answer | None]], *, within: float = BOUND, every: float = 0.01
) -> Answer:
    """Wait until the condition is met, and return its value."""
    deadline = time.monotonic() + within
    while True:
        if answer := await condition():
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {within} s")
        await asyncio.sleep(every)
