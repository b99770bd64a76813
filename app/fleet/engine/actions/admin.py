"""Administration of actions: listing them, pausing and resuming one.

One statement reads the whole list. It finds the last run of each action by steps through indexes, so neither the number
of finished runs nor a backlog makes it slow. The last run is the one with the highest id: finished, running or pending.

An action that no living instance has in its code is `vanished`: its runs and its pause stay, and no instance schedules
or claims it. An action that only instances of role `web` have is in the state `no_worker`: it can be triggered, it is
scheduled, and its runs wait. The summary of an action is only in the code, so it is returned only for the actions of
this instance.

Pausing writes the action's row. The scheduler locks that row while it inserts the run of a slot
(`dispatch/scheduler.py`), so the scheduler either has committed before the pause, or sees it. A claim that is under way
may still start runs. Pausing and resuming are short transactions of their own, because claims and the scheduler skip an
action whose row is locked.

A resumed action continues with the next slot after now: slots during the pause are not missed slots. The next slot is
computed from the last one, as always, so a pause does not move the following slots. Resuming an action that is not
paused does nothing, so a slot that is due stays due.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from psycopg.rows import dict_row

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.db.pool.statements import SHORT_IDLE
from app.fleet.duration import format_duration, format_rate
from app.fleet.engine.actions.action import NAME
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.schedule import Misfire, Overlap, Schedule
from app.fleet.errors import ActionUnknown
from app.fleet.runs.effects.notifications import notify_sql
from app.fleet.runs.read import pages
from app.fleet.runs.read.pages import ListedRun
from app.fleet.runs.read.queues import QUEUES

ActionState = Literal["active", "paused", "no_worker", "vanished"]


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """An action, as `GET /actions` and the command line show it."""

    name: str
    summary: str | None
    schedule: str | None
    state: ActionState
    next_run_at: datetime | None
    last_run: ListedRun | None
    # Names of the instances that have running runs of the action, and of those that would claim its runs.
    running_on: list[str]
    standby: list[str]
    overlap: Overlap
    misfire: Misfire
    priority: int
    max_attempts: int
    concurrency: int | None
    rate: str | None
    burst: int | None
    retention: str


# The subquery `last` is ordered by all columns of the index. If it were ordered by the id alone, the planner might scan
# all finished runs for an action that has none. It finds the last entry at or below (action, state) in the index, which
# may belong to another action; the condition outside removes that entry.
LIST = Statement(f"""
WITH running AS (
    SELECT r.action_id, max(r.id) AS newest, array_agg(DISTINCT r.instance ORDER BY r.instance) AS instances
    FROM {{schema}}.runs AS r
    WHERE r.state = 'running'
    GROUP BY r.action_id
), living AS (
    SELECT u.action_id, array_agg(i.name ORDER BY i.name) FILTER (WHERE i.role <> 'web') AS instances
    FROM {{schema}}.standby AS s
    JOIN {{schema}}.instances AS i ON i.id = s.instance_id AND i.state <> 'gone', unnest(s.action_ids) AS u (action_id)
    GROUP BY u.action_id
)
SELECT a.name, a.schedule, a.next_run_at, a.paused_at IS NOT NULL AS paused, a.overlap, a.misfire, a.priority,
       a.max_attempts, a.concurrency, a.rate_interval, a.rate_burst,
       extract(epoch FROM a.retention)::float8 AS retention,
       coalesce(r.instances, ARRAY[]::text[]) AS running_on, coalesce(l.instances, ARRAY[]::text[]) AS standby,
       l.action_id IS NOT NULL AS known,
       greatest(r.newest, w.last, e.newest) AS last_run
FROM {{schema}}.actions AS a
LEFT JOIN running AS r ON r.action_id = a.id
LEFT JOIN living AS l ON l.action_id = a.id
LEFT JOIN LATERAL (
    SELECT max(last.id) AS newest
    FROM (VALUES ('succeeded'), ('failed'), ('cancelled')) AS s (state), LATERAL (
        SELECT f.action_id, f.state, f.id
        FROM {{schema}}.finished_runs AS f
        WHERE (f.action_id, f.state, f.id) <= (a.id, s.state, {2**63 - 1})
        ORDER BY f.action_id DESC, f.state DESC, f.id DESC
        LIMIT 1
    ) AS last
    WHERE last.action_id = a.id AND last.state = s.state
) AS e ON true
LEFT JOIN LATERAL (
    SELECT q.id AS last
    FROM {{schema}}.runs AS q
    WHERE q.state = 'pending' AND (q.action_id, q.id) > (a.id, 0) AND (q.action_id, q.id) <= (a.id, {2**63 - 1})
    ORDER BY q.action_id DESC, q.id DESC
    LIMIT 1
) AS w ON true
WHERE %(name)s::text IS NULL OR a.name = %(name)s
ORDER BY a.name
""")

PAUSE = Statement("UPDATE {schema}.actions SET paused_at = clock_timestamp() WHERE id = %(id)s AND paused_at IS NULL")

READ_PAUSED = Statement("""
SELECT schedule, next_run_at, clock_timestamp()
FROM {schema}.actions
WHERE id = %(id)s AND paused_at IS NOT NULL
FOR NO KEY UPDATE
""")

RESUME = Statement("""
UPDATE {schema}.actions
SET paused_at = NULL, next_run_at = %(next)s
WHERE id = %(id)s
RETURNING pg_notify('{channel}', 'slots:')
""")

NOTIFY_PENDING = Statement(f"""
WITH RECURSIVE {QUEUES}
{notify_sql("queues WHERE action_id = %(id)s")}
""")

FIND_ID = Statement("SELECT id FROM {schema}.actions WHERE name = %(name)s")


async def find(connection: Connection, namespace: Namespace, catalogue: Catalogue, name: str) -> ActionRecord:
    found = await read(connection, namespace, catalogue, name) if NAME.fullmatch(name) else []
    if not found:
        raise unknown(name)
    return found[0]


async def find_all(connection: Connection, namespace: Namespace, catalogue: Catalogue) -> list[ActionRecord]:
    """Return all actions, including vanished ones, by name."""
    return await read(connection, namespace, catalogue, None)


async def id_of(connection: Connection, namespace: Namespace, name: str) -> int:
    """Return the id of an action, whether it is in the code of this instance or not."""
    rows = []
    if NAME.fullmatch(name):
        rows = await (await connection.execute(namespace.sql(FIND_ID), {"name": name})).fetchall()
    if not rows:
        raise unknown(name)
    return int(rows[0][0])


async def pause(connection: Connection, namespace: Namespace, name: str) -> None:
    """Pause an action: no run of it is scheduled or claimed until it is resumed."""
    identifier = await id_of(connection, namespace, name)
    await connection.execute(namespace.sql(PAUSE), {"id": identifier})


async def resume(connection: Connection, namespace: Namespace, name: str) -> None:
    """Resume an action, with its next slot and its pending runs."""
    identifier = await id_of(connection, namespace, name)
    async with connection.transaction():
        await connection.execute(SHORT_IDLE)
        await resume_in(connection, namespace, identifier)


async def resume_in(connection: Connection, namespace: Namespace, identifier: int) -> None:
    row = await (await connection.execute(namespace.sql(READ_PAUSED), {"id": identifier})).fetchone()
    if row is None:
        return
    schedule, next_run_at, now = row
    if schedule is not None and next_run_at is not None and next_run_at <= now:
        slots = Schedule.parse(schedule)
        next_run_at = slots.after(slots.latest(next_run_at, now))
    await connection.execute(namespace.sql(RESUME), {"id": identifier, "next": next_run_at})
    await connection.execute(namespace.sql(NOTIFY_PENDING), {"id": identifier})


async def read(
    connection: Connection, namespace: Namespace, catalogue: Catalogue, name: str | None
) -> list[ActionRecord]:
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(namespace.sql(LIST), {"name": name})
        rows = await cursor.fetchall()
    ids = [row["last_run"] for row in rows if row["last_run"] is not None]
    last = {run.id: run for run in await pages.find_listed(connection, namespace, ids)} if ids else {}
    # A run that was pruned between the two statements is left out.
    return [record(row, catalogue, last.get(row["last_run"])) for row in rows]


def record(row: dict[str, Any], catalogue: Catalogue, last_run: ListedRun | None) -> ActionRecord:
    state = state_of(row)
    return ActionRecord(
        name=row["name"],
        summary=(catalogue[row["name"]].summary or None) if row["name"] in catalogue else None,
        schedule=row["schedule"],
        state=state,
        # The table keeps the next slot of a paused action, but it is not due then.
        next_run_at=row["next_run_at"] if state in ("active", "no_worker") else None,
        last_run=last_run,
        running_on=row["running_on"],
        standby=row["standby"],
        overlap=row["overlap"],
        misfire=row["misfire"],
        priority=row["priority"],
        max_attempts=row["max_attempts"],
        concurrency=row["concurrency"],
        rate=None if row["rate_interval"] is None else format_rate(row["rate_interval"]),
        burst=row["rate_burst"],
        retention=format_duration(row["retention"]),
    )


def state_of(row: dict[str, Any]) -> ActionState:
    if not row["known"]:
        return "vanished"
    if row["paused"]:
        return "paused"
    return "active" if row["standby"] else "no_worker"


def unknown(name: str) -> ActionUnknown:
    return ActionUnknown(f"there is no action {name!r}: `flotilla actions` or GET /actions lists them")
