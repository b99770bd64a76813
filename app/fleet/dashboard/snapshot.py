"""The state of the whole cluster for the pages: read at most once in `MAX_AGE`, however many viewers there are."""

from dataclasses import dataclass
from datetime import datetime

from fastapi import Request

from app.fleet.cluster.anomalies import Anomaly
from app.fleet.cluster.registry import Instance
from app.fleet.dashboard.frame.page import reading
from app.fleet.dashboard.frame.shared import Shared
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


class Snapshots(Shared[Snapshot]):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    async def latest(self) -> Snapshot:
        return await self.get(MAX_AGE, TIMEOUT)

    async def _read(self) -> Snapshot:
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
