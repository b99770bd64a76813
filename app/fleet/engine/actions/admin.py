"""Actions as one reads them: what the database says of each, and what an operator may do to one: pause it, resume it.

One statement for the whole list, however many actions, instances and finished runs there are. It finds the last run of
each action by stepping through indexes, so that neither history nor a backlog makes it slow. The last run is the newest
of those that ended, those that run, and, of those that wait, the one at the end of the queue of each priority.

An action that nobody's code has any more is `vanished`: it keeps its runs and its pause, and nobody schedules or claims
it. What only code knows, its summary, is known for the actions of this instance.

Pausing writes to the action's row, which the scheduler locks while it makes the run of a slot
(`dispatch/scheduler.py`): its transaction has committed by then, or sees the pause. A claim that is under way at that
moment may still start runs.

Both are short transactions of their own, because claims and the scheduler leave an action alone whose row is locked.

Resuming goes on with the next slot after now: slots during the pause were not missed, they were not wanted. Slots are
counted on from the last one, as everywhere, so that a pause does not move those that follow. Resuming what is not
paused does nothing at all: a slot that has just become due stays due.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from psycopg.rows import dict_row

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Connection
from app.fleet.duration import format_duration
from app.fleet.engine.actions.action import NAME, Catalogue
from app.fleet.engine.actions.schedule import Misfire, Overlap, Schedule
from app.fleet.engine.dispatch.claim import SHORT
from app.fleet.errors import ActionUnknown
from app.fleet.runs import pages
from app.fleet.runs.notifications import notify_sql
from app.fleet.runs.pages import ListedRun

ActionState = Literal["active", "paused", "vanished"]


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """An action, as everyone sees it."""

    name: str
    summary: str | None
    schedule: str | None
    state: ActionState
    next_run_at: datetime | None
    last_run: ListedRun | None
    # Names of instances: those that run it now, and those whose code has it.
    running_on: list[str]
    standby: list[str]
    overlap: Overlap
    misfire: Misfire
    priority: int
    max_attempts: int
    concurrency: int | None
    rate: str | None
    retention: str


# The priorities at which runs of `a` wait: from one to the next through the index, and never through a queue.
PRIORITIES = """
    WITH RECURSIVE place AS (
        (
            SELECT priority
            FROM {schema}.runs
            WHERE state = 'pending' AND action_id = a.id
            ORDER BY priority
            LIMIT 1
        )
        UNION ALL
        SELECT n.priority
        FROM place AS p, LATERAL (
            SELECT priority
            FROM {schema}.runs
            WHERE state = 'pending' AND action_id = a.id AND priority > p.priority
            ORDER BY priority
            LIMIT 1
        ) AS n
    )
"""

# `last`: by all columns of the index and not by the id alone, which would invite the planner to walk back through the
# whole history for an action that has none. It finds the last entry at or before this action's in each of the states,
# which may be another's.
LOOK = Statement(f"""
WITH running AS (
    SELECT r.action_id, max(r.id) AS newest, array_agg(DISTINCT r.instance ORDER BY r.instance) AS instances
    FROM {{schema}}.runs AS r
    WHERE r.state = 'running'
    GROUP BY r.action_id
), living AS (
    SELECT u.action_id, array_agg(i.name ORDER BY i.name) AS instances
    FROM {{schema}}.standby AS s
    JOIN {{schema}}.instances AS i ON i.id = s.instance_id AND i.state <> 'gone', unnest(s.action_ids) AS u (action_id)
    GROUP BY u.action_id
)
SELECT a.name, a.schedule, a.next_run_at, a.paused_at IS NOT NULL AS paused, a.overlap, a.misfire, a.priority,
       a.max_attempts, a.concurrency, a.rate_interval, a.rate_burst,
       extract(epoch FROM a.retention)::float8 AS retention,
       coalesce(r.instances, ARRAY[]::text[]) AS running_on, coalesce(l.instances, ARRAY[]::text[]) AS standby,
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
    {PRIORITIES}
    SELECT max(q.id) AS last
    FROM place AS p, LATERAL (
        SELECT id
        FROM {{schema}}.runs
        WHERE state = 'pending' AND action_id = a.id AND priority = p.priority
        ORDER BY run_at DESC, id DESC
        LIMIT 1
    ) AS q
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

TELL_WAITING = Statement(f"""
WITH waiting AS (
    SELECT a.id AS action_id, w.priority, w.run_at
    FROM {{schema}}.actions AS a, LATERAL (
        {PRIORITIES}
        SELECT p.priority, q.run_at
        FROM place AS p, LATERAL (
            SELECT run_at
            FROM {{schema}}.runs
            WHERE state = 'pending' AND action_id = a.id AND priority = p.priority
            ORDER BY run_at
            LIMIT 1
        ) AS q
    ) AS w
    WHERE a.id = %(id)s
)
{notify_sql("waiting")}
""")

ID = Statement("SELECT id FROM {schema}.actions WHERE name = %(name)s")


async def find(connection: Connection, namespace: Namespace, catalogue: Catalogue, name: str) -> ActionRecord:
    found = await look(connection, namespace, catalogue, name) if NAME.fullmatch(name) else []
    if not found:
        raise unknown(name)
    return found[0]


async def find_all(connection: Connection, namespace: Namespace, catalogue: Catalogue) -> list[ActionRecord]:
    """Return every action there is or was, by name."""
    return await look(connection, namespace, catalogue, None)


async def id_of(connection: Connection, namespace: Namespace, name: str) -> int:
    """Return the id of an action, whether our code has it or not."""
    rows = []
    if NAME.fullmatch(name):
        rows = await (await connection.execute(namespace.sql(ID), {"name": name})).fetchall()
    if not rows:
        raise unknown(name)
    return int(rows[0][0])


async def pause(connection: Connection, namespace: Namespace, name: str) -> None:
    """Have nothing scheduled or claimed of it from now on, until it is resumed."""
    identifier = await id_of(connection, namespace, name)
    await connection.execute(namespace.sql(PAUSE), {"id": identifier})


async def resume(connection: Connection, namespace: Namespace, name: str) -> None:
    """Go on with its next slot, and with the runs that wait."""
    identifier = await id_of(connection, namespace, name)
    async with connection.transaction():
        await connection.execute(SHORT)
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
    await connection.execute(namespace.sql(TELL_WAITING), {"id": identifier})


async def look(
    connection: Connection, namespace: Namespace, catalogue: Catalogue, name: str | None
) -> list[ActionRecord]:
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(namespace.sql(LOOK), {"name": name})
        rows = await cursor.fetchall()
    wanted = [row["last_run"] for row in rows if row["last_run"] is not None]
    last = {run.id: run for run in await pages.find_listed(connection, namespace, wanted)} if wanted else {}
    # One that was forgotten between the two statements is none.
    return [record(row, catalogue, last.get(row["last_run"])) for row in rows]


def record(row: dict[str, Any], catalogue: Catalogue, last_run: ListedRun | None) -> ActionRecord:
    state = state_of(row)
    return ActionRecord(
        name=row["name"],
        summary=(catalogue[row["name"]].summary or None) if row["name"] in catalogue else None,
        schedule=row["schedule"],
        state=state,
        # Kept in the table for when it goes on; until then, nothing is next.
        next_run_at=row["next_run_at"] if state == "active" else None,
        last_run=last_run,
        running_on=row["running_on"],
        standby=row["standby"],
        overlap=row["overlap"],
        misfire=row["misfire"],
        priority=row["priority"],
        max_attempts=row["max_attempts"],
        concurrency=row["concurrency"],
        rate=rate(row["rate_interval"], row["rate_burst"]),
        retention=format_duration(row["retention"]),
    )


def state_of(row: dict[str, Any]) -> ActionState:
    if not row["standby"]:
        return "vanished"
    return "paused" if row["paused"] else "active"


def rate(interval: float | None, burst: int | None) -> str | None:
    """Write a rate the way it can be declared: `10/s`, `5/10s`."""
    if interval is None or burst is None:
        return None
    return re.sub(r"/1(?=[a-z])", "/", f"{burst}/{format_duration(round(interval * burst, 3))}")


def unknown(name: str) -> ActionUnknown:
    return ActionUnknown(f"there is no action {name!r}: `flotilla actions` or GET /actions lists them")
