"""How a run is cancelled on request: at once while it is pending, by its instance while it is running.

Each statement returns the run as it has changed it, on a connection in autocommit mode: no lock on the row outlives the
statement. For a running run, the row keeps the request, and a notification makes it quick. If the notification is lost,
the instance finds the request in its next reconciliation; if the run becomes pending meanwhile, it ends as cancelled.
"""

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.errors import RunNotReady
from app.fleet.runs.effects.notifications import notify_sql
from app.fleet.runs.end import FEED_INSERT_ENDED, INSERT_FINISHED, NEXT_OF_ORDERED
from app.fleet.runs.read.records import ACTIVE_COLUMNS, FINISHED_COLUMNS, RunRecord, change, find

# The next run of its ordering key may be claimed now.
CANCEL_PENDING = Statement(f"""
WITH removed AS (
    DELETE FROM {{schema}}.runs
    WHERE id = %(id)s AND state = 'pending'
    RETURNING *, 'cancelled' AS ended_as, NULL AS ended_with, 'cancelled on request, while it waited' AS ended_by
), feed_rows AS (
    {FEED_INSERT_ENDED}
), notified AS (
    {notify_sql(NEXT_OF_ORDERED)}
), ended AS (
    {INSERT_FINISHED}RETURNING *
)
SELECT {FINISHED_COLUMNS}
FROM ended AS r
JOIN {{schema}}.actions AS a ON a.id = r.action_id, (SELECT count(*) FROM notified) AS n
""")

CANCEL_RUNNING = Statement(f"""
WITH asked AS (
    UPDATE {{schema}}.runs
    SET cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp())
    WHERE id = %(id)s AND state = 'running'
    RETURNING *
), notified AS (
    SELECT pg_notify('{{channel}}', 'cancel:' || id) FROM asked
)
SELECT {ACTIVE_COLUMNS}
FROM asked AS r
JOIN {{schema}}.actions AS a ON a.id = r.action_id, (SELECT count(*) FROM notified) AS n
""")


async def cancel_run(connection: Connection, namespace: Namespace, run_id: int) -> RunRecord:
    # Between the two statements a pending run may be claimed, and a running one requeued. A second try finds it.
    for _ in range(2):
        for statement in (CANCEL_PENDING, CANCEL_RUNNING):
            if run := await change(connection, namespace, statement, run_id):
                return run
    run = await find(connection, namespace, run_id)
    raise RunNotReady(f"run {run_id} has ended already ({run.state}), and cannot be cancelled")
