"""The state of the whole cluster for the pages: read at most once in `MAX_AGE`, however many viewers there are."""

import asyncio
from dataclasses import dataclass
from datetime import datetime

from fastapi import Request

from app.fleet.cluster.anomalies import Anomaly
from app.fleet.cluster.registry import Instance
from app.fleet.coordination.locks import admin as locks
from app.fleet.coordination.locks.admin import LockRecord
from app.fleet.dashboard.frame.page import reading
from app.fleet.db.namespace import Statement
from app.fleet.edge.context import Context
from app.fleet.engine.actions import admin as actions
from app.fleet.engine.actions.admin import ActionRecord
from app.fleet.engine.figures.cluster_figures import RUNNABLE

MAX_AGE = 1.0
# All statements of a snapshot together.
TIMEOUT = 2.0

# The changes of instances in the last hour: they joined, became the leader, and left or were declared gone.
HISTORY = Statement("""
SELECT at, instance, what, detail
FROM (
    SELECT started_at AS at, name AS instance, 'joined' AS what, version AS detail FROM {schema}.instances
    UNION ALL
    SELECT gone_at, name, CASE WHEN gone_reason = 'left' THEN 'left' ELSE 'gone' END, gone_reason
    FROM {schema}.instances
    WHERE state = 'gone'
    UNION ALL
    SELECT began_at, instance, 'led', NULL FROM {schema}.leader_terms
) AS e
WHERE at > clock_timestamp() - interval '1 h'
ORDER BY at DESC
LIMIT 200
""")
READ_CLOCK = Statement("SELECT clock_timestamp()")


@dataclass(frozen=True)
class Change:
    at: datetime
    instance: str
    what: str
    detail: str | None


@dataclass(frozen=True)
class Snapshot:
    """Everything as of one moment, by PostgreSQL's clock."""

    now: datetime
    instances: list[Instance]
    anomalies: list[Anomaly]
    history: list[Change]
    actions: list[ActionRecord]
    # By action: how many of its runs could begin now, and for how many seconds the oldest is due.
    runnable: dict[str, tuple[int, float]]
    locks: list[LockRecord]


class Snapshots:
    def __init__(self, context: Context) -> None:
        self.reads = 0
        self._context = context
        self._lock = asyncio.Lock()
        # The last snapshot, or why there is none, and when it was read. Viewers share a failure too: otherwise each of
        # them would wait for a database that does not answer, one after the other.
        self._last: Snapshot | Exception | None = None
        self._read_at = 0.0
        self._changes = 0

    async def latest(self) -> Snapshot:
        async with self._lock:
            loop = asyncio.get_running_loop()
            if self._last is None or loop.time() - self._read_at >= MAX_AGE:
                changes = self._changes
                try:
                    async with asyncio.timeout(TIMEOUT):
                        found: Snapshot | Exception = await self._read()
                except Exception as error:  # noqa: BLE001 — raised below, and for the other viewers
                    found = error
                # A change that was made during the read may not be in it.
                self._last = found if changes == self._changes else None
                self._read_at = loop.time()
            else:
                found = self._last
        if isinstance(found, Exception):
            raise found
        return found

    def forget(self) -> None:
        """Something was changed here: the next page must show it."""
        self._changes += 1
        self._last = None

    async def _read(self) -> Snapshot:
        self.reads += 1
        context, namespace = self._context, self._context.database.namespace
        instances = await context.member.instances()
        anomalies = await context.coordination.anomalies.find(instances)
        async with reading(context) as connection:
            ((now,),) = await (await connection.execute(namespace.sql(READ_CLOCK))).fetchall()
            history = await (await connection.execute(namespace.sql(HISTORY))).fetchall()
            runnable = await (await connection.execute(namespace.sql(RUNNABLE))).fetchall()
            return Snapshot(
                now=now,
                instances=instances,
                anomalies=anomalies,
                history=[Change(*row) for row in history],
                actions=await actions.find_all(connection, namespace, context.engine.catalogue),
                runnable={name: (runs, seconds) for name, runs, seconds in runnable},
                locks=await locks.list_locks(connection, namespace),
            )


def snapshots_of(request: Request) -> Snapshots:
    """Return the snapshots of this application."""
    state = request.app.state
    if not hasattr(state, "dashboard"):
        state.dashboard = Snapshots(state.fleet)
    found: Snapshots = state.dashboard
    return found


async def latest(request: Request) -> Snapshot:
    return await snapshots_of(request).latest()
