"""The state of the cluster for the pages, each part shared by all viewers (`frame/shared_reads.py`)."""

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta

from fastapi import Request

from app.fleet.cluster.anomalies import Anomaly
from app.fleet.cluster.registry import Instance
from app.fleet.dashboard.frame.page import reading
from app.fleet.dashboard.frame.shared_reads import context_of, shared
from app.fleet.db.namespace import Statement
from app.fleet.engine.actions import admin as actions
from app.fleet.engine.actions.admin import ActionRecord
from app.fleet.engine.figures.cluster_figures import RUNNABLE

# What changes seldom, and takes several statements, is read less often.
SLOW_AGE = 5.0

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
# And the ports of the other instances on this machine that serve the dashboard.
READ_NOW = Statement("""
SELECT clock_timestamp(), ARRAY(
    SELECT i.port
    FROM {schema}.instances AS i
    WHERE i.state = 'ready' AND i.role <> 'worker' AND i.hostname = %(hostname)s AND i.port <> %(port)s
    ORDER BY i.port
    LIMIT 10
)
""")


@dataclass(frozen=True)
class Change:
    at: datetime
    instance: str
    what: str
    detail: str | None


async def now(request: Request) -> datetime:
    """Return PostgreSQL's time: as it was read a few seconds ago, and what has passed since then.

    For a browser that talks to this instance directly, the page gets the addresses of the others, too: when this one
    drains, the page moves to another. Behind a load balancer, any request does.
    """
    loop, own = asyncio.get_running_loop(), context_of(request).member.registration

    async def read() -> tuple[datetime, float, list[int]]:
        context = context_of(request)
        values = {"hostname": own.hostname, "port": own.port}
        async with reading(context) as connection:
            cursor = await connection.execute(context.database.namespace.sql(READ_NOW), values)
            ((at, ports),) = await cursor.fetchall()
            return at, loop.time(), ports

    at, read_at, ports = await shared(request, "now", read, max_age=SLOW_AGE)
    request.state.other_ports = ports if request.url.port == own.port else []
    return at + timedelta(seconds=loop.time() - read_at)


async def instances(request: Request) -> list[Instance]:
    return await shared(request, "instances", context_of(request).member.instances)


async def anomalies(request: Request) -> list[Anomaly]:
    async def read() -> list[Anomaly]:
        return await context_of(request).coordination.anomalies.find(await instances(request))

    return await shared(request, "anomalies", read, statements=7, max_age=SLOW_AGE)


async def history(request: Request) -> list[Change]:
    async def read() -> list[Change]:
        context = context_of(request)
        async with reading(context) as connection:
            rows = await (await connection.execute(context.database.namespace.sql(HISTORY))).fetchall()
        return [Change(*row) for row in rows]

    return await shared(request, "history", read, max_age=SLOW_AGE)


async def runnable(request: Request) -> dict[str, tuple[int, float]]:
    """Return, by action, how many of its runs could begin now, and for how many seconds the oldest is due."""

    async def read() -> dict[str, tuple[int, float]]:
        context = context_of(request)
        async with reading(context) as connection:
            rows = await (await connection.execute(context.database.namespace.sql(RUNNABLE))).fetchall()
        return {name: (runs, seconds) for name, runs, seconds in rows}

    return await shared(request, "runnable", read)


async def all_actions(request: Request) -> list[ActionRecord]:
    async def read() -> list[ActionRecord]:
        context = context_of(request)
        async with reading(context) as connection:
            return await actions.find_all(connection, context.database.namespace, context.engine.catalogue)

    return await shared(request, "actions", read, statements=2)


async def action_id(request: Request, name: str) -> int:
    async def read() -> int:
        context = context_of(request)
        async with reading(context) as connection:
            return await actions.id_of(connection, context.database.namespace, name)

    # It never changes.
    return await shared(request, ("action id", name), read, max_age=3600.0)
