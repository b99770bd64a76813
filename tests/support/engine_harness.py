"""The parts of the engine on a real database, without an instance: nothing runs except what the test calls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import uuid4

from app.fleet import Run, action
from app.fleet.cluster.registry import Identity
from app.fleet.db import dsn, migrations
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Database
from app.fleet.db.server_clock import ServerClock
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.synchronise import synchronise
from app.fleet.engine.dispatch.backlog import Backlog
from app.fleet.engine.dispatch.claimant import Claimant
from app.fleet.engine.dispatch.scheduler import Scheduler
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.enqueue.trigger import Triggers
from app.fleet.lifecycle import Lifecycle
from app.fleet.runs.effects.notifications import QUEUE_PRIORITY
from app.fleet.stream.hub import Hub
from app.fleet.stream.relay import Relay
from app.settings import Settings

NAMESPACE = Namespace("flotilla")


class Leader:
    """Stands in for a member that is the leader and holds everything."""

    leading = True

    def holds(self) -> bool:
        return True


def declare(name: str = "tick", **options: Any) -> Action[Any]:
    @action(name, **options)
    async def tick(_: Run) -> None: ...

    return tick


class Claimed(NamedTuple):
    run_id: int
    token: int
    priority: int


class EngineHarness:
    """One database, and the parts of the engine that a test needs on it."""

    def __init__(self, address: str, database: Database, catalogue: Catalogue, stack: AsyncExitStack) -> None:
        self.address = address
        self.database = database
        self.catalogue = catalogue
        self._stack = stack

    async def scheduler(self) -> Scheduler:
        made = Scheduler(self.database, Leader(), self.catalogue, Lifecycle(), ServerClock())  # type: ignore[arg-type]
        self._stack.push_async_callback(made.close)
        return made

    async def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        async with self.database.connection() as connection:
            await connection.execute("SET LOCAL search_path TO flotilla")
            cursor = await connection.execute(statement, values or None)
            return await cursor.fetchall() if cursor.description else []

    async def instance(self, name: str) -> "Claiming":
        """Register an instance, and return it with a claimant."""
        rows = await self.sql(
            """
            INSERT INTO instances (id, name, run_id, state, hostname, pid, version, connections, started_at,
                                   heartbeat_at, server_started_at)
            SELECT nextval('instance_ids'), %s, %s, 'ready', 'test', 1, 'test', 1, now(), now(),
                   pg_postmaster_start_time()
            RETURNING id, name, run_id
            """,
            name,
            uuid4(),
        )
        clock = ServerClock()
        backlog = Backlog(self.catalogue, clock)
        claimant = Claimant(NAMESPACE, self.catalogue, backlog, clock)
        return Claiming(self, Identity(*rows[0]), claimant, backlog, clock)

    async def trigger(self, *orders: Order) -> list[int]:
        return [
            done.id
            for done in await Triggers(self.database, self.catalogue, Hub(self.database, Relay(self.database))).trigger(
                orders
            )
        ]

    async def due(self, since: timedelta = timedelta(), name: str = "tick") -> datetime:
        """Make the action due since some time ago, and return the slot."""
        statement = "UPDATE actions SET next_run_at = clock_timestamp() - %s WHERE name = %s RETURNING next_run_at"
        ((slot,),) = await self.sql(statement, since, name)
        return slot  # type: ignore[no-any-return]

    async def slots(self) -> list[datetime]:
        return [row[0] for row in await self.sql("SELECT scheduled_for FROM runs ORDER BY scheduled_for")]

    async def next_slot(self) -> datetime:
        ((slot,),) = await self.sql("SELECT next_run_at FROM actions")
        return slot  # type: ignore[no-any-return]


@dataclass
class Claiming:
    """An instance that claims, as a dispatcher does."""

    harness: EngineHarness
    identity: Identity
    claimant: Claimant
    backlog: Backlog
    clock: ServerClock

    async def claim(self, room: int = 100, *, everywhere: bool = True) -> list[Claimed]:
        """Claim from every queue that the database has, or only from those that this instance knows."""
        now = asyncio.get_running_loop().time()
        if everywhere:
            ((server_now,),) = await self.harness.sql("SELECT clock_timestamp()")
            self.clock.learn(server_now, now)
            queues = f"SELECT action_id, {QUEUE_PRIORITY}, min(run_at) FROM runs WHERE state = 'pending' GROUP BY 1, 2"
            for action_id, priority, run_at in await self.harness.sql(queues):
                self.backlog.add(action_id, priority, run_at, now)
        async with self.harness.database.autocommit() as connection:
            rows = await self.claimant.claim(connection, self.identity, self.backlog.due(now), room, now)
        return [Claimed(row[0], row[2], row[6]) for row in rows]


@asynccontextmanager
async def engine_harness(address: str, *actions: Action[Any], pool_max: int = 14) -> AsyncIterator[EngineHarness]:
    # On a busy machine, opening a connection may take seconds.
    settings = Settings.load(database_url=address, pool_max=pool_max, pool_timeout=60.0)
    addresses = dsn.resolve(settings)
    await asyncio.to_thread(migrations.migrate, addresses.direct, NAMESPACE)
    database = Database(settings, addresses, NAMESPACE)
    await database.start()
    catalogue = Catalogue({each.name: each for each in actions})
    async with AsyncExitStack() as stack:
        stack.push_async_callback(database.stop)
        async with database.connection() as connection:
            await synchronise(connection, NAMESPACE, catalogue)
        yield EngineHarness(address, database, catalogue, stack)
