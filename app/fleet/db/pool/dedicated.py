"""A dedicated connection: one connection of the pool that its user keeps, so that its statements never wait for one.

The engine has `DEDICATED_CONNECTIONS` of them: its claims, its writes and its scheduling must not queue behind the
requests of the service. A dedicated connection is in autocommit mode, and one task at a time uses it. After an error,
or after an outage, it is closed, and the next use borrows another one. A pool of fewer than `MIN_POOL_SIZE` connections
has none to spare: there, each use borrows a connection and returns it.

Its statements are planned for tables that grow (`PLANNER_SETTINGS`). Behind a pooler no setting can be made for a
session; there, each statement is planned again for each use.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from app.fleet.db.namespace import Statement

if TYPE_CHECKING:
    from app.fleet.db.pool.pool import Connection, Database, PooledConnection

# To claim, to write what attempts report, and to schedule.
DEDICATED_CONNECTIONS = 3
MIN_POOL_SIZE = 6

# The driver prepares a statement at its first use, possibly while its tables are small, and the server keeps the plan
# while they grow.
# - enable_seqscan: each statement has an index to use and must not scan a table because it is short today.
# - jit: before PostgreSQL 18, a plan without an alternative to a disabled node looks so expensive that it is compiled.
# - plan_cache_mode: one generic plan from the first use on, and not after five uses, so that the first thousand runs
#   of a day are claimed as fast as the last.
# - enable_nestloop: while a table is empty, comparing each row of a batch with each row found looks as good as any
#   other join, and for a thousand rows it means a million comparisons. LATERAL joins still use nested loops.
PLANNER_SETTINGS = Statement(
    "SET enable_seqscan = off; SET jit = off; SET plan_cache_mode = force_generic_plan; SET enable_nestloop = off"
)


class DedicatedConnection:
    def __init__(self, database: "Database") -> None:
        self._database = database
        self._turn = asyncio.Lock()
        self._connection: PooledConnection | None = None
        # The pool's number of outages when the connection was borrowed.
        self._outages = 0

    @asynccontextmanager
    async def connection(self) -> AsyncIterator["Connection"]:
        async with self._turn:
            if not self._database.has_dedicated_connections:
                async with self._database.autocommit() as connection:
                    yield connection
                return
            try:
                yield await self._ready()
            except BaseException as error:
                self._database.report_error(error)
                # The connection's state is unknown; replacing it is cheaper than finding out.
                await self._discard()
                raise

    async def close(self) -> None:
        async with self._turn:
            await self._discard()

    async def _ready(self) -> "Connection":
        if self._connection is not None and (self._connection.closed or self._outages != self._database.outages):
            await self._discard()
        if self._connection is None:
            self._outages = self._database.outages
            self._connection = await self._database.borrow_dedicated()
            await self._connection.set_autocommit(True)
            if not self._database.pooled:
                # Several statements in one text cannot be prepared.
                await self._connection.execute(PLANNER_SETTINGS, prepare=False)
                self._connection.prepare_threshold = 0
        return self._connection

    async def _discard(self) -> None:
        """Close the connection and return it: its settings must not reach the next borrower."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.pgconn.finish()
            await self._database.return_connection(connection)
