"""How a run is cancelled on request: at once while it is pending, by its instance while it is running.

The statements are sent in autocommit mode: no lock on a row outlives its statement. Those for one run return the run as
they have changed it; those for many return ids, and skip rows that another transaction has locked. For a running run,
the row keeps the request, and a notification makes it quick. If the notification is lost, the instance finds the
request in its next reconciliation; if the run becomes pending meanwhile, it ends as cancelled.
"""

from collections.abc import Sequence

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.db.pool.statements import fetch
from app.fleet.errors import RunNotReady
from app.fleet.runs.effects.notifications import notify_sql
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.end import FEED_INSERT_ENDED, INSERT_FINISHED, NEXT_OF_ORDERED
from app.fleet.runs.read.records import ACTIVE_COLUMNS, FINISHED_COLUMNS, RunRecord, change, find


def cancel_pending_sql(condition: str, then: str) -> str:
    """Return the statement that ends pending runs that meet a condition.

    The next runs of their ordering keys may be claimed now.
    """
    return f"""
WITH removed AS (
    DELETE FROM {{schema}}.runs
    WHERE {condition}
    RETURNING *, 'cancelled' AS ended_as, NULL AS ended_with, 'cancelled on request, while it waited' AS ended_by
), feed_rows AS (
    {FEED_INSERT_ENDED}
), notified AS (
    {notify_sql(NEXT_OF_ORDERED)}
), ended AS (
    {INSERT_FINISHED}RETURNING *
)
{then}
"""


def cancel_running_sql(condition: str, then: str) -> str:
    """Return the statement that requests the cancellation of running runs that meet a condition."""
    return f"""
WITH asked AS (
    UPDATE {{schema}}.runs
    SET cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp())
    WHERE {condition}
    RETURNING *
), notified AS (
    SELECT pg_notify('{{channel}}', 'cancel:' || id) FROM asked
)
{then}
"""


def these(state: str) -> str:
    """Return the condition for the given runs of an action in a state, without rows that are locked elsewhere."""
    return f"""id = ANY (ARRAY(
        SELECT r.id
        FROM {{schema}}.runs AS r
        WHERE r.id = ANY (%(ids)s::int8[]) AND r.action_id = %(action)s AND r.state = '{state}'
        ORDER BY r.id
        FOR UPDATE SKIP LOCKED
    ))"""


CANCEL_PENDING = Statement(
    cancel_pending_sql(
        "id = %(id)s AND state = 'pending'",
        f"""
SELECT {FINISHED_COLUMNS}
FROM ended AS r
JOIN {{schema}}.actions AS a ON a.id = r.action_id, (SELECT count(*) FROM notified) AS n
""",
    )
)
CANCEL_RUNNING = Statement(
    cancel_running_sql(
        "id = %(id)s AND state = 'running'",
        f"""
SELECT {ACTIVE_COLUMNS}
FROM asked AS r
JOIN {{schema}}.actions AS a ON a.id = r.action_id, (SELECT count(*) FROM notified) AS n
""",
    )
)
CANCEL_THESE_PENDING = Statement(
    cancel_pending_sql(these("pending"), "SELECT ended.id FROM ended, (SELECT count(*) FROM notified) AS n")
)
CANCEL_THESE_RUNNING = Statement(
    cancel_running_sql(these("running"), "SELECT asked.id FROM asked, (SELECT count(*) FROM notified) AS n")
)


async def cancel_run(connection: Connection, namespace: Namespace, run_id: int) -> RunRecord:
    # Between the two statements a pending run may be claimed, and a running one requeued. A second try finds it.
    for _ in range(2):
        for statement in (CANCEL_PENDING, CANCEL_RUNNING):
            if run := await change(connection, namespace, statement, run_id):
                return run
    run = await find(connection, namespace, run_id)
    raise RunNotReady(f"run {run_id} has ended already ({run.state}), and cannot be cancelled")


async def cancel_these(
    connection: Connection, namespace: Namespace, action_id: int, state: RunState, run_ids: Sequence[int]
) -> list[int]:
    """Cancel these runs of an action; return the ids of those that were in this state, `pending` or `running`."""
    statement = CANCEL_THESE_PENDING if state is RunState.PENDING else CANCEL_THESE_RUNNING
    values = {"action": action_id, "ids": list(run_ids)}
    return [row[0] for row in await fetch(connection, namespace.sql(statement), values)]
