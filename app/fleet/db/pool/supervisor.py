"""The supervisor of the pool: it notices an outage once, and restores the pool as soon as the database answers.

A pool without one hands out its broken connections one by one after an outage, or waits in a backoff that has grown
during the outage (half a minute, measured). Here, the first code that meets a broken connection calls `suspect`, and so
does the link when it breaks. Then, once per outage, every connection is replaced; a probe connects four times a second
until the database is fit; then every connection is replaced again, and the pool grows at once.

The database is fit if it accepts writes and is the database of the link. To compare them, the link's session holds an
advisory lock with a random key, the marker (`preflight`): a connection that can take that lock leads elsewhere.
"""

import asyncio
import enum
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool

from app.fleet.background import cancel_and_wait
from app.fleet.db.preflight import MARKER_IS_FREE
from app.fleet.telemetry.logs import event_log
from app.fleet.telemetry.redaction import redact

PROBE_INTERVAL = 0.25

log = event_log(__name__)


class Probe(enum.Enum):
    """The result of one probe."""

    UNAVAILABLE = enum.auto()
    ELSEWHERE = enum.auto()
    FIT = enum.auto()


class Supervisor:
    def __init__(self, pool: AsyncConnectionPool[Any], conninfo: str) -> None:
        self.outages = 0
        self._pool = pool
        self._conninfo = conninfo
        self._healthy = asyncio.Event()
        self._healthy.set()
        self._suspected = asyncio.Event()
        self._link_marker: Callable[[], int | None] = lambda: None
        self._task: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        return self._healthy.is_set()

    async def wait_until_healthy(self) -> None:
        await self._healthy.wait()

    def suspect(self, reason: str) -> None:
        """Begin an outage, unless one has begun."""
        if not self._suspected.is_set():
            log.warning("pool.suspected", reason=redact(reason))
            self.outages += 1
            self._healthy.clear()
            self._suspected.set()

    def compare_with(self, link_marker: Callable[[], int | None]) -> None:
        """From now on, compare connections with the database in which the link's session holds this marker."""
        self._link_marker = link_marker

    async def leads_elsewhere(self, connection: psycopg.AsyncConnection[TupleRow]) -> bool:
        """Whether the marker of the link's session is free in the database of this connection."""
        marker = self._link_marker()
        if marker is None:
            return False
        row = await (await connection.execute(MARKER_IS_FREE, [marker])).fetchone()
        # If the link broke meanwhile, its marker was released and the comparison means nothing.
        return row == (True,) and self._link_marker() == marker

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise(), name="pool-supervisor")

    async def stop(self) -> None:
        await cancel_and_wait(self._task)

    async def _supervise(self) -> None:
        while True:
            await self._suspected.wait()
            since = asyncio.get_running_loop().time()
            await self._pool.drain()
            elsewhere = 0
            while (result := await self._probe()) is not Probe.FIT:
                # The first time, the link may just be breaking.
                elsewhere += result is Probe.ELSEWHERE
                if elsewhere == 2:
                    log.error("pool.elsewhere")
                await asyncio.sleep(PROBE_INTERVAL)
            # Connections that were opened during the outage may be broken or lead to the wrong host.
            await self._pool.drain()
            await self._pool.check()
            self._suspected.clear()
            self._healthy.set()
            log.info("pool.recovered", seconds=round(asyncio.get_running_loop().time() - since, 2))

    async def _probe(self) -> Probe:
        try:
            async with await psycopg.AsyncConnection.connect(
                self._conninfo, autocommit=True, prepare_threshold=None
            ) as connection:
                row = await (await connection.execute("SHOW transaction_read_only")).fetchone()
                if row != ("off",):
                    return Probe.UNAVAILABLE
                return Probe.ELSEWHERE if await self.leads_elsewhere(connection) else Probe.FIT
        except psycopg.Error:
            return Probe.UNAVAILABLE
