"""How an operator retries a run that has ended: its row moves from `finished_runs` back to `runs`, and is pending.

It is the same run: the same id and key, and it continues from the last checkpoint. Its token is kept, because it may
only grow. The statements are sent in autocommit mode; with `overlap="skip"`, in a transaction that has the action's
lock.

A retry makes a run active. An action with `overlap="skip"` has at most one active run (`overlap.py`). So a retry is
refused while another run of such an action is active, and a retry of many runs retries at most one of them and counts
the others.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, get_args

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.db.pool.statements import fetch
from app.fleet.errors import RunNotReady, RunUnknown
from app.fleet.runs import overlap
from app.fleet.runs.effects.events import ended_event_insert_sql
from app.fleet.runs.effects.feed import feed_insert_sql
from app.fleet.runs.effects.notifications import notify_sql
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read.records import ACTIVE_COLUMNS, RunRecord, change, find

# The states in which a run can be tried again.
Retryable = Literal[RunState.FAILED, RunState.CANCELLED]
RETRYABLE: tuple[RunState, ...] = get_args(Retryable)
# How many runs one statement retries.
BATCH = 1000


def revive_sql(condition: str, then: str) -> str:
    """Return the statement that makes finished runs that meet a condition pending again."""
    return f"""
WITH back AS (
    DELETE FROM {{schema}}.finished_runs WHERE {condition} RETURNING *
), added AS (
    INSERT INTO {{schema}}.runs (
        id, action_id, priority, run_at, token, instance, max_attempts, trigger, scheduled_for, key, ordering_key,
        payload, checkpoint, progress, error, events, created_at, triggered_by, request_id, trace_parent
    )
    SELECT id, action_id, priority, clock_timestamp(), token, instance, max_attempts, trigger, scheduled_for, key,
           ordering_key, payload, checkpoint, progress, error, events + 1, created_at, triggered_by, request_id,
           trace_parent
    FROM back
    RETURNING *
), written AS (
    {ended_event_insert_sql("back")}
), feed_rows AS (
    {feed_insert_sql("added", "'pending'")}
), notified AS (
    {notify_sql("added")}
)
{then}
"""


# A run that is being deleted has an `expires_at` of the epoch (`engine/maintenance/pruner.py`), and may lack events.
REVIVE = Statement(
    revive_sql(
        "id = %(id)s AND state IN ('failed', 'cancelled') AND expires_at > 'epoch'",
        f"""
SELECT {ACTIVE_COLUMNS}
FROM added AS r
JOIN {{schema}}.actions AS a ON a.id = r.action_id, (SELECT count(*) FROM notified) AS n
""",
    )
)

# A batch of the runs of one action that ended in some states within some time. It reads a range of the index on action,
# state and id in its order, so a batch reads what it takes, however many runs have ended.
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
# SKIP LOCKED: two requests at the same moment do not wait for each other.
REVIVE_MANY = Statement(
    revive_sql(
        f"""id = ANY (ARRAY({ENDED}
        FOR UPDATE SKIP LOCKED
    ))""",
        "SELECT (SELECT count(*) FROM added), (SELECT count(*) FROM notified)",
    )
)
REVIVE_THESE = Statement(
    revive_sql(
        """id = ANY (ARRAY(
        SELECT f.id
        FROM {schema}.finished_runs AS f
        WHERE f.id = ANY (%(ids)s::int8[]) AND f.action_id = %(action)s AND f.state = %(state)s
          AND f.expires_at > 'epoch'
        ORDER BY f.id
        LIMIT %(most)s
        FOR UPDATE SKIP LOCKED
    ))""",
        "SELECT (SELECT count(*) FROM added), (SELECT count(*) FROM notified)",
    )
)

OVERLAP_OF_RUN = Statement("""
SELECT a.id, a.name, a.overlap
FROM {schema}.finished_runs AS f
JOIN {schema}.actions AS a ON a.id = f.action_id
WHERE f.id = %(id)s
""")
OVERLAP = Statement("SELECT overlap FROM {schema}.actions WHERE id = %(action)s")

NOW = Statement("SELECT clock_timestamp()")

# A pending run that waits for a later time is due now.
HURRY = Statement(f"""
WITH hurried AS (
    UPDATE {{schema}}.runs
    SET run_at = clock_timestamp()
    WHERE id = %(id)s AND state = 'pending' AND run_at > clock_timestamp()
    RETURNING *
), notified AS (
    {notify_sql("hurried")}
)
SELECT {ACTIVE_COLUMNS}
FROM hurried AS r
JOIN {{schema}}.actions AS a ON a.id = r.action_id, (SELECT count(*) FROM notified) AS n
""")


class Retried(NamedTuple):
    """How many runs are tried again, and how many are not because of `overlap="skip"`."""

    many: int
    left_out: int


async def retry_run(connection: Connection, namespace: Namespace, run_id: int) -> RunRecord:
    """Make a failed or cancelled run pending; a run that is pending for a later time is due now."""
    # Between two of these statements the run may end, and begin again. A second try finds it.
    for _ in range(2):
        changed = await revive_one(connection, namespace, run_id)
        changed = changed or await change(connection, namespace, HURRY, run_id)
        run = changed or await find(connection, namespace, run_id)
        if run.state is RunState.PENDING:
            return run
        if run.state not in RETRYABLE:
            break
    if run.state in RETRYABLE:
        raise RunUnknown(f"run {run_id} ended so long ago that it is being deleted")
    what = "it is running" if run.state is RunState.RUNNING else "it succeeded; trigger the action to execute it again"
    raise RunNotReady(f"run {run_id} cannot be tried again: {what}")


async def retry_runs(
    connection: Connection,
    namespace: Namespace,
    action_id: int,
    *,
    states: Sequence[RunState] = (RunState.FAILED,),
    since: timedelta | None = None,
    until: timedelta | None = None,
    limit: int | None = None,
) -> Retried:
    """Retry the runs of an action that ended in these states, at most `since` and at least `until` ago.

    Each batch is a separate transaction. A run that fails again meanwhile is not retried again.
    """
    values: dict[str, Any] = {"action": action_id, "states": list(states)}
    values["first_state"], values["last_state"] = min(states), max(states)
    values["since"], values["until"] = await instants(connection, namespace, since, until)
    ((overlap_option,),) = await fetch(connection, namespace.sql(OVERLAP), {"action": action_id})
    if overlap_option == "skip":
        return await retry_one_of(connection, namespace, {**values, "most": limit})
    done = 0
    while limit is None or done < limit:
        values["most"] = BATCH if limit is None else min(BATCH, limit - done)
        ((many, _),) = await fetch(connection, namespace.sql(REVIVE_MANY), values)
        done += many
        if many < values["most"]:
            break
    return Retried(done, 0)


async def retry_one_of(connection: Connection, namespace: Namespace, values: dict[str, Any]) -> Retried:
    """Retry the first of these runs, unless a run of their action is active."""
    action_id, many = values["action"], 0
    async with connection.transaction():
        active = await overlap.hold(connection, namespace, [action_id])
        ((found,),) = await fetch(connection, namespace.sql(COUNT_ENDED), values)
        if active[action_id] is None:
            ((many, _),) = await fetch(connection, namespace.sql(REVIVE_MANY), {**values, "most": 1})
    return Retried(many, max(found - many, 0))


async def retry_these(
    connection: Connection, namespace: Namespace, action_id: int, state: RunState, run_ids: Sequence[int]
) -> Retried:
    """Retry those of these runs of an action that are in this state, `failed` or `cancelled`, in one transaction."""
    values = {"action": action_id, "ids": list(run_ids), "state": state, "most": len(run_ids)}
    ((overlap_option,),) = await fetch(connection, namespace.sql(OVERLAP), {"action": action_id})
    if overlap_option != "skip":
        ((many, _),) = await fetch(connection, namespace.sql(REVIVE_THESE), values)
        return Retried(many, 0)
    many = 0
    async with connection.transaction():
        active = await overlap.hold(connection, namespace, [action_id])
        if active[action_id] is None:
            ((many, _),) = await fetch(connection, namespace.sql(REVIVE_THESE), {**values, "most": 1})
    return Retried(many, len(run_ids) - many)


async def revive_one(connection: Connection, namespace: Namespace, run_id: int) -> RunRecord | None:
    rows = await fetch(connection, namespace.sql(OVERLAP_OF_RUN), {"id": run_id})
    if not rows or rows[0][2] != "skip":
        return await change(connection, namespace, REVIVE, run_id)
    ((action_id, name, _),) = rows
    async with connection.transaction():
        active = (await overlap.hold(connection, namespace, [action_id]))[action_id]
        # The active run may be this very one: another request has retried it.
        if active is not None and active != run_id:
            raise overlap.already_active(name, active)
        return await change(connection, namespace, REVIVE, run_id)


async def instants(
    connection: Connection, namespace: Namespace, since: timedelta | None, until: timedelta | None
) -> tuple[datetime | None, datetime]:
    """Return the instants that long ago, by PostgreSQL's clock."""
    row = await (await connection.execute(namespace.sql(NOW))).fetchone()
    assert row is not None
    return None if since is None else row[0] - since, row[0] - (until or timedelta(0))
