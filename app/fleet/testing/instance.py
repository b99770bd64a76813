"""An instance of the service in the test process, and what a test does with it.

The instance is real: `create_app`, its lifespan, PostgreSQL. It has the role `web`, so it executes nothing by itself,
and its scheduler is stopped: the test decides when runs are executed and when time passes. Attempts are executed in
line, one after the other, by a worker in the same process (`worker.py`).
"""

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from pydantic_core import to_jsonable_python
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.db.pool.pool import Database
from app.fleet.duration import Duration
from app.fleet.edge.context import Context
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.run import P
from app.fleet.engine.engine import Engine
from app.fleet.engine.enqueue.orders import Order
from app.fleet.errors import EngineError
from app.fleet.runs import retry
from app.fleet.runs.claim import Row
from app.fleet.runs.effects.states import RunState
from app.fleet.testing import survival
from app.fleet.testing.clock import MAX_SLOTS, TestClock
from app.fleet.testing.faults import Fault, Point, Watch
from app.fleet.testing.stored import WHY_NOT, StoredRun, find_ids, read_runs
from app.fleet.testing.worker import Worker
from app.fleet.validation import check_duration

if TYPE_CHECKING:
    import httpx

# More attempts of one run, or runs of one `run_due`, are a mistake in the test.
MAX_ATTEMPTS = 1000
# The instance of a test ends quickly, and waits for a busy machine.
SETTINGS: dict[str, Any] = {
    "role": "web",
    "drain_delay": 0.0,
    "drain_timeout": 2.0,
    "pause_timeout": 1.0,
    "pool_timeout": 60.0,
}
ENDED = (RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED)


class Instance:
    """One instance of the service. The fixture `instance` makes one for each test."""

    def __init__(self, app: FastAPI, client: "httpx.AsyncClient") -> None:
        self.app = app
        self.client = client
        self._context: Context = app.state.fleet
        self._database: Database = self._context.database
        self._engine: Engine = self._context.engine
        self._clock = TestClock(self._database, self._context.member, self._engine.catalogue)
        self._worker: Worker | None = None
        # Those that have died, or have been overtaken.
        self._lost: list[Worker] = []
        # The points that the last attempt has reached.
        self.points: Sequence[Point] = ()

    def transaction(self) -> AbstractAsyncContextManager[AsyncSession]:
        """One transaction on the database of the service, committed at the end of the block."""
        return self._database.session()

    # -- runs ---------------------------------------------------------------------------------------------------------

    async def trigger(
        self,
        action: Action[P] | str,
        payload: P | None = None,
        *,
        key: str | None = None,
        run_at: datetime | None = None,
        priority: int | None = None,
        ordering_key: str | None = None,
    ) -> StoredRun:
        """Create a run, as the service's code does, and return it. It is not executed."""
        order = Order(name_of(action), payload, key, run_at, priority, ordering_key)
        (done,) = await self._engine.triggers.trigger([order])
        return await self.read(done.id)

    async def run(
        self,
        action: Action[P] | str,
        payload: P | None = None,
        *faults: Fault,
        key: str | None = None,
        priority: int | None = None,
        ordering_key: str | None = None,
    ) -> StoredRun:
        """Create a run and execute it to its end: see `execute`."""
        run = await self.trigger(action, payload, key=key, priority=priority, ordering_key=ordering_key)
        return await self.execute(run.id, *faults)

    async def execute(self, run_id: int, *faults: Fault) -> StoredRun:
        """Execute a run to its end, with all its attempts; delays, of its retries too, and a rate do not wait.

        The first fault is for the first attempt, the second for the second, and so on.
        """
        left = list(faults)
        for _ in range(MAX_ATTEMPTS):
            run = await self.read(run_id)
            if run.state in ENDED:
                if left:
                    raise AssertionError(f"run {run_id} has {run.state} before it {left[0]}: {run.error or 'no error'}")
                return run
            await self._clock.free_rate(run.action)
            async with self._database.autocommit() as connection:
                await retry.retry_run(connection, self._database.namespace, run_id)
            await self._attempt(run_id, left)
        raise EngineError(f"run {run_id} has not ended after {MAX_ATTEMPTS} attempts")

    async def attempt(self, run_id: int, fault: Fault | None = None) -> StoredRun:
        """Execute one attempt of a run that is due; return the run as the attempt leaves it."""
        await self._attempt(run_id, [] if fault is None else [fault])
        return await self.read(run_id)

    async def run_due(self) -> list[StoredRun]:
        """Execute all attempts that are due, until none is due any more; return the runs in their order."""
        executed: list[int] = []
        while (row := await (worker := await self._living_worker()).claim()) is not None:
            executed.append(row[0])
            if len(executed) > MAX_ATTEMPTS:
                run = await self.read(row[0])
                raise EngineError(f"more than {MAX_ATTEMPTS} attempts were due, the last one of {run.action!r}")
            await self._execute(worker, row, [])
        return await read_runs(self._database, executed)

    async def read(self, run_id: int) -> StoredRun:
        (run,) = await read_runs(self._database, [run_id])
        return run

    async def runs_triggered(self, action: Action[Any] | str | None = None, payload: Any = None) -> list[StoredRun]:
        """Return the runs of an action (default: of all), oldest first, in any state.

        With `payload`, only the runs whose payload has all fields of it; a model must be equal.
        """
        ids = await find_ids(self._database, None if action is None else name_of(action))
        runs = await read_runs(self._database, ids)
        return [run for run in runs if payload is None or self._has(run, payload)]

    async def survives(
        self,
        action: Action[P] | str,
        arrange: Callable[[], Awaitable[P | None]],
        effects: Callable[[StoredRun], Awaitable[Any]],
    ) -> list[Point]:
        """Execute an action once without a fault, and once for each point at which it can die (`survival.py`)."""
        return await survival.survives(self, self._database, action, arrange, effects)

    # -- time ---------------------------------------------------------------------------------------------------------

    async def schedule(self, action: Action[Any] | str) -> StoredRun:
        """Let the next slot of a scheduled action be due now, and return its run. It is not executed."""
        declared = self._declared(action)
        known = set(await find_ids(self._database, declared.name))
        await self._clock.make_due(declared)
        new = [each for each in await find_ids(self._database, declared.name) if each not in known]
        if not new:
            raise EngineError(
                f'the slot of {declared.name!r} has no run: the action is paused, or has overlap="skip" and a run of '
                f"it is active"
            )
        return await self.read(new[-1])

    async def advance(self, by: Duration, *scheduled: Action[Any] | str) -> None:
        """Let time pass: delays pass, and each slot of these scheduled actions gets its run. Nothing is executed."""
        actions = [self._declared(each) for each in scheduled]
        left, slots = length(by), 0
        while left:
            left = await self._clock.advance(left, actions)
            slots += 1
            check_slots(slots, by)

    async def run_for(self, by: Duration, *scheduled: Action[Any] | str) -> list[StoredRun]:
        """Let time pass, and execute everything at the time at which it is due; return the runs in their order."""
        actions = [self._declared(each) for each in scheduled]
        left, slots = length(by), 0
        executed = await self.run_due()
        while left:
            wait = await self._clock.until_next_run()
            step = left if wait is None else min(wait, left)
            left = left - step + await self._clock.advance(step, actions)
            slots += 1
            check_slots(slots, by)
            executed += await self.run_due()
        return executed

    # -- helpers ------------------------------------------------------------------------------------------------------

    async def _living_worker(self) -> Worker:
        if self._worker is None:
            worker = Worker(self._context)
            await worker.start()
            self._worker = worker
        return self._worker

    async def _attempt(self, run_id: int, faults: list[Fault]) -> None:
        worker = await self._living_worker()
        row = await worker.claim(run_id)
        if row is None:
            raise EngineError(f"run {run_id} cannot be executed now: {await self._why_not(run_id)}")
        await self._execute(worker, row, faults)

    async def _execute(self, worker: Worker, row: Row, faults: list[Fault]) -> None:
        """Execute the attempt of a claimed run, up to its end or to the first of these faults, which is removed."""
        fault = faults.pop(0) if faults else None
        watch = worker.begin(row, fault)
        struck = asyncio.ensure_future(watch.struck.wait())
        ended = asyncio.ensure_future(worker.until_ended(row))
        try:
            await asyncio.wait({struck, ended}, return_when=asyncio.FIRST_COMPLETED)
            self.points = tuple(watch.points)
            if fault is None:
                return
            if not struck.done():
                reached = ", ".join(map(str, watch.points)) or "no point"
                raise AssertionError(f"the attempt never reached {fault.point}; it reached {reached}")
            self._worker = None
            self._lost.append(worker)
            if fault.kind == "death":
                await worker.die(row[0])
            else:
                await self._overtake(worker, row[0], watch, ended, faults)
        finally:
            struck.cancel()
            ended.cancel()

    async def _overtake(
        self, worker: Worker, run_id: int, watch: Watch, ended: "asyncio.Future[None]", faults: list[Fault]
    ) -> None:
        """Give the run to another attempt; this attempt continues and ends, and then the other one is executed."""
        await worker.lose(run_id)
        successor = await self._living_worker()
        row = await successor.claim(run_id)
        if row is None:
            why = await self._why_not(run_id)
            raise AssertionError(f"no other attempt can have run {run_id} at {watch.points[-1]}: {why}")
        watch.resume()
        await ended
        await self._execute(successor, row, faults)

    async def _why_not(self, run_id: int) -> str:
        """Say why a run cannot be claimed."""
        run = await self.read(run_id)
        if run.state is not RunState.PENDING:
            return f"it is {run.state}"
        async with self._database.autocommit() as connection:
            cursor = await connection.execute(self._database.namespace.sql(WHY_NOT), {"id": run_id})
            row = await cursor.fetchone()
        assert row is not None
        seconds, paused, earlier = row
        if paused:
            return f"the action {run.action!r} is paused"
        if earlier is not None:
            return f"run {earlier} has the same ordering key, and has not ended"
        if seconds > 0:
            return f"it is due in {seconds:.3g} s: `advance` lets time pass, and `execute` does not wait"
        return f"a limit of the action {run.action!r} is reached (`rate` or `concurrency`)"

    def _declared(self, action: Action[Any] | str) -> Action[Any]:
        return self._engine.catalogue[name_of(action)]

    def _has(self, run: StoredRun, payload: Any) -> bool:
        if isinstance(payload, dict):
            fields = to_jsonable_python(payload)
            return all(name in run.payload and run.payload[name] == value for name, value in fields.items())
        return bool(json.loads(self._engine.catalogue[run.action].encode(payload) or "{}") == run.payload)

    async def close(self) -> None:
        for worker in (*self._lost, self._worker):
            if worker is not None:
                await worker.close()


@asynccontextmanager
async def running_instance(address: str, **settings: Any) -> AsyncIterator[Instance]:
    """Run the service on this database, with these settings."""
    import httpx

    # By name: the fleet imports nothing of the service.
    given = {"database_url": address, "_env_file": None, **SETTINGS, **settings}
    loaded = importlib.import_module("app.settings").Settings.load(**given)
    app: FastAPI = importlib.import_module("app.main").create_app(loaded)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://service") as client,
    ):
        await app.state.fleet.engine.scheduler.stop()
        instance = Instance(app, client)
        try:
            yield instance
        finally:
            await instance.close()


def name_of(action: Action[Any] | str) -> str:
    return action if isinstance(action, str) else action.name


def length(by: Duration) -> timedelta:
    return timedelta(seconds=check_duration("the duration", by, EngineError))


def check_slots(slots: int, by: Duration) -> None:
    if slots > MAX_SLOTS:
        raise EngineError(f"more than {MAX_SLOTS} slots and delays are within {by}: let less time pass")
