"""Runs as one reads them: from `runs` while they wait or run, from `finished_runs` afterwards, under one id.

Both are asked in one statement, which sees one moment: a run that is moving is in one of them, never in both or none.
What an operator may do to a run is here too: cancel it, or have it tried again. Each is one statement, which answers
with the run as it has made it, on a connection in autocommit mode: no lock on a run's row outlives it.

A retry makes a run active. Of an action with `overlap="skip"` one run is active at most (`overlap.py`), so a retry is
refused while another one is, and a retry of many retries one of them at most and counts the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, get_args

from psycopg.rows import class_row

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Connection
from app.fleet.db.statements import fetch
from app.fleet.db.stored_json import StoredJsonLoader
from app.fleet.errors import RunNotReady, RunUnknown
from app.fleet.runs import overlap
from app.fleet.runs.end import FEED_INSERT_ENDED, INSERT_FINISHED, NEXT_OF_ORDERED
from app.fleet.runs.events import ended_event_insert_sql
from app.fleet.runs.feed import feed_insert_sql
from app.fleet.runs.notifications import notify_sql

State = Literal["pending", "running", "succeeded", "failed", "cancelled"]
Trigger = Literal["schedule", "api", "code"]
ACTIVE = ("pending", "running")
# What may be had tried again.
Again = Literal["failed", "cancelled"]
AGAIN: tuple[str, ...] = get_args(Again)
# How many in one statement.
AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run, as everyone sees it. `payload`, `result` and `progress` are what JSON makes of them."""

    id: int
    action: str
    state: State
    trigger: Trigger
    payload: Any
    scheduled_for: datetime | None
    run_at: datetime
    ordering_key: str | None
    attempt: int
    max_attempts: int
    instance: str | None
    result: Any
    error: str | None
    progress: Any
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


ACTIVE_COLUMNS = """
r.id, a.name AS action, r.state, r.trigger, coalesce(r.payload, '{}'::json) AS payload, r.scheduled_for, r.run_at,
r.ordering_key, r.attempt, r.max_attempts, r.instance, NULL::json AS result, r.error, r.progress,
r.created_at, r.started_at, NULL::timestamptz AS finished_at
"""
FINISHED_COLUMNS = ACTIVE_COLUMNS.replace("NULL::json AS", "r.").replace("NULL::timestamptz AS", "r.")

FROM_ACTIVE = f"SELECT {ACTIVE_COLUMNS} FROM {{schema}}.runs AS r JOIN {{schema}}.actions AS a ON a.id = r.action_id"
FROM_FINISHED = (
    f"SELECT {FINISHED_COLUMNS} FROM {{schema}}.finished_runs AS r JOIN {{schema}}.actions AS a ON a.id = r.action_id"
)

FIND = Statement(f"{FROM_ACTIVE} WHERE r.id = ANY (%(ids)s) UNION ALL {FROM_FINISHED} WHERE r.id = ANY (%(ids)s)")

# Of a line it may have been the head.
CANCEL_PENDING = Statement(f"""
WITH gone AS (
    DELETE FROM {{schema}}.runs
    WHERE id = %(id)s AND state = 'pending'
    RETURNING *, 'cancelled' AS ended_as, NULL AS ended_with, 'cancelled on request, while it waited' AS ended_by
), noted AS (
    {FEED_INSERT_ENDED}
), told AS (
    {notify_sql(NEXT_OF_ORDERED)}
), ended AS (
    {INSERT_FINISHED}RETURNING *
)
SELECT {FINISHED_COLUMNS}
FROM ended AS r
JOIN {{schema}}.actions AS a ON a.id = r.action_id, (SELECT count(*) FROM told) AS t
""")

# The row asks, and stays asking when the run moves; the notification makes it quick.
CANCEL_RUNNING = Statement(f"""
WITH asked AS (
    UPDATE {{schema}}.runs
    SET cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp())
    WHERE id = %(id)s AND state = 'running'
    RETURNING *
), told AS (
    SELECT pg_notify('{{channel}}', 'cancel:' || id) FROM asked
)
SELECT {ACTIVE_COLUMNS}
FROM asked AS r
JOIN {{schema}}.actions AS a ON a.id = r.action_id, (SELECT count(*) FROM told) AS t
""")


def revive(which: str, then: str) -> str:
    """Return the statement that has runs tried again that ended.

    They are the same runs: same id, same key, from the last checkpoint. The token is kept, so that it goes on growing.
    """
    return f"""
WITH back AS (
    DELETE FROM {{schema}}.finished_runs WHERE {which} RETURNING *
), added AS (
    INSERT INTO {{schema}}.runs (
        id, action_id, priority, run_at, token, instance, max_attempts, trigger, scheduled_for, key, ordering_key,
        payload, checkpoint, progress, error, events, created_at
    )
    SELECT id, action_id, priority, clock_timestamp(), token, instance, max_attempts, trigger, scheduled_for, key,
           ordering_key, payload, checkpoint, progress, error, events + 1, created_at
    FROM back
    RETURNING *
), written AS (
    {ended_event_insert_sql("back")}
), noted AS (
    {feed_insert_sql("added", "'pending'")}
), told AS (
    {notify_sql("added")}
)
{then}
"""


# One that is being pruned (`engine/maintenance/pruner.py`) has an `expires_at` of the epoch, and may have lost events
# already.
REVIVE = Statement(
    revive(
        "id = %(id)s AND state IN ('failed', 'cancelled') AND expires_at > 'epoch'",
        f"""
SELECT {ACTIVE_COLUMNS}
FROM added AS r
JOIN {{schema}}.actions AS a ON a.id = r.action_id, (SELECT count(*) FROM told) AS t
""",
    )
)

# A batch of those that ended in a state, of one action, within some time. A range of the index on action, state and id,
# read in its order: a batch reads what it takes, however many have failed. Of both states, `cancelled` comes first.
ENDED = f"""
        SELECT f.id
        FROM {{schema}}.finished_runs AS f
        WHERE (f.action_id, f.state, f.id) > (%(action)s, %(first_state)s, 0)
          AND (f.action_id, f.state, f.id) <= (%(action)s, %(last_state)s, {2**63 - 1})
          AND f.state = ANY (%(states)s::text[])
          AND f.expires_at > 'epoch'
          AND f.finished_at >= coalesce(%(since)s::timestamptz, '-infinity') AND f.finished_at <= %(until)s
        ORDER BY f.action_id, f.state, f.id
        LIMIT %(most)s
"""
COUNT_ENDED = Statement(f"SELECT count(*) FROM ({ENDED}) AS f")
# Two requests at the same moment do not wait for each other.
REVIVE_MANY = Statement(
    revive(
        f"""id = ANY (ARRAY({ENDED}
        FOR UPDATE SKIP LOCKED
    ))""",
        "SELECT (SELECT count(*) FROM added), (SELECT count(*) FROM told)",
    )
)

# Of which action a run is, and whether one run of it at a time may be active.
OVERLAP_OF_RUN = Statement("""
SELECT a.id, a.name, a.overlap
FROM {schema}.finished_runs AS f
JOIN {schema}.actions AS a ON a.id = f.action_id
WHERE f.id = %(id)s
""")
OVERLAP = Statement("SELECT overlap FROM {schema}.actions WHERE id = %(action)s")

NOW = Statement("SELECT clock_timestamp()")

HURRY = Statement(f"""
WITH hurried AS (
    UPDATE {{schema}}.runs
    SET run_at = clock_timestamp()
    WHERE id = %(id)s AND state = 'pending' AND run_at > clock_timestamp()
    RETURNING *
), told AS (
    {notify_sql("hurried")}
)
SELECT {ACTIVE_COLUMNS}
FROM hurried AS r
JOIN {{schema}}.actions AS a ON a.id = r.action_id, (SELECT count(*) FROM told) AS t
""")


async def find(connection: Connection, namespace: Namespace, identifier: int) -> RunRecord:
    found = await find_all(connection, namespace, [identifier])
    if not found:
        raise RunUnknown(f"there is no run {identifier}, or it ended so long ago that it was forgotten")
    return found[0]


async def find_all(connection: Connection, namespace: Namespace, identifiers: Sequence[int]) -> list[RunRecord]:
    async with connection.cursor(row_factory=class_row(RunRecord)) as cursor:
        cursor.adapters.register_loader("json", StoredJsonLoader)
        await cursor.execute(namespace.sql(FIND), {"ids": list(identifiers)})
        return await cursor.fetchall()


async def cancel(connection: Connection, namespace: Namespace, identifier: int) -> RunRecord:
    """Cancel a run: at once if it waits; if it runs, its instance is told, wherever that is."""
    # Pending may become running between the two, and running pending: once more is enough for either.
    for _ in range(2):
        for statement in (CANCEL_PENDING, CANCEL_RUNNING):
            if run := await change(connection, namespace, statement, identifier):
                return run
    run = await find(connection, namespace, identifier)
    raise RunNotReady(f"run {identifier} has ended already ({run.state}), and cannot be cancelled")


async def change(
    connection: Connection, namespace: Namespace, statement: Statement, identifier: int
) -> RunRecord | None:
    """Change a run by one statement; return it as it is then, or None if it is in no state for that."""
    async with connection.cursor(row_factory=class_row(RunRecord)) as cursor:
        cursor.adapters.register_loader("json", StoredJsonLoader)
        await cursor.execute(namespace.sql(statement), {"id": identifier})
        return await cursor.fetchone()


class Retried(NamedTuple):
    """How many runs are tried again, and how many are not, because of `overlap="skip"`."""

    many: int
    left_out: int


async def retry_many(
    connection: Connection,
    namespace: Namespace,
    action_id: int,
    *,
    states: Sequence[str] = ("failed",),
    since: timedelta | None = None,
    until: timedelta | None = None,
    most: int | None = None,
) -> Retried:
    """Have runs tried again that ended in these states, at most and at least so long ago.

    In batches, each a transaction of its own. What fails again meanwhile is left alone.
    """
    values: dict[str, Any] = {"action": action_id, "states": list(states)}
    values["first_state"], values["last_state"] = min(states), max(states)
    values["since"], values["until"] = await instants(connection, namespace, since, until)
    ((alone,),) = await fetch(connection, namespace.sql(OVERLAP), {"action": action_id})
    if alone == "skip":
        return await retry_one_of(connection, namespace, {**values, "most": most})
    done = 0
    while most is None or done < most:
        values["most"] = AT_ONCE if most is None else min(AT_ONCE, most - done)
        ((many, _),) = await fetch(connection, namespace.sql(REVIVE_MANY), values)
        done += many
        if many < values["most"]:
            break
    return Retried(done, 0)


async def retry_one_of(connection: Connection, namespace: Namespace, values: dict[str, Any]) -> Retried:
    """Have the first of these tried again, unless a run of their action is active."""
    action_id, many = values["action"], 0
    async with connection.transaction():
        active = await overlap.hold(connection, namespace, [action_id])
        ((found,),) = await fetch(connection, namespace.sql(COUNT_ENDED), values)
        if active[action_id] is None:
            ((many, _),) = await fetch(connection, namespace.sql(REVIVE_MANY), {**values, "most": 1})
    return Retried(many, max(found - many, 0))


async def instants(
    connection: Connection, namespace: Namespace, since: timedelta | None, until: timedelta | None
) -> tuple[datetime | None, datetime]:
    """When that was, by PostgreSQL's clock."""
    row = await (await connection.execute(namespace.sql(NOW))).fetchone()
    assert row is not None
    return None if since is None else row[0] - since, row[0] - (until or timedelta(0))


async def retry(connection: Connection, namespace: Namespace, identifier: int) -> RunRecord:
    """Have a run tried again that failed or was cancelled; one that waits for a later time is tried now."""
    # It may end between two of these statements, and begin again: once more is enough for either.
    for _ in range(2):
        changed = await revive_one(connection, namespace, identifier)
        changed = changed or await change(connection, namespace, HURRY, identifier)
        run = changed or await find(connection, namespace, identifier)
        if run.state == "pending":
            return run
        if run.state not in AGAIN:
            break
    if run.state in AGAIN:
        raise RunUnknown(f"run {identifier} ended so long ago that it is being forgotten")
    what = "it is running" if run.state == "running" else "it succeeded; to have it done once more, trigger the action"
    raise RunNotReady(f"run {identifier} cannot be tried again: {what}")


async def revive_one(connection: Connection, namespace: Namespace, identifier: int) -> RunRecord | None:
    rows = await fetch(connection, namespace.sql(OVERLAP_OF_RUN), {"id": identifier})
    if not rows or rows[0][2] != "skip":
        return await change(connection, namespace, REVIVE, identifier)
    ((action_id, name, _),) = rows
    async with connection.transaction():
        active = (await overlap.hold(connection, namespace, [action_id]))[action_id]
        # It may be this very run, which another retry has made active.
        if active is not None and active != identifier:
            raise overlap.already_active(name, active)
        return await change(connection, namespace, REVIVE, identifier)
