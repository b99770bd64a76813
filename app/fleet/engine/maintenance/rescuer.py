"""What becomes of runs whose attempt ended without a word.

Two nets, with two error texts:

    the instance died         in the transaction of its death (`Rescue`): `pending` again, with the checkpoint. Of
                              more than `BATCH` runs, the rest in transactions after that one
    the handler hangs         its deadline and then `SLACK` passed, and its own instance did not end it, because its
                              event loop is blocked or its link is all that is left of it: as if it had raised

Both lock the rows FOR UPDATE first and skip those that somebody has locked: a transaction that is guarded by the run
(`Run.guard`) holds its row until it ends, and nobody takes the run over before that. What was skipped is found again by
the next sweep, which also looks for runs of instances that are gone (there are none, unless they were skipped).

The token stays as it is: the next claim moves it. A late writer is refused already, because its run is not `running`.

A run whose cancellation was requested ends here, cancelled.

A death is not held against a run: it uses up no retry. But a run that takes its process down with it (a crash in a C
library, more memory than there is) would take one after the other, so `DEATHS` of them are enough.
"""

from collections.abc import Sequence
from typing import Any

from app.fleet.cluster.anomalies import Anomaly
from app.fleet.cluster.registry import BATCH, Instance, Session
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Connection
from app.fleet.runs.end import FEED_INSERT_ENDED, INSERT_FINISHED, NEXT_OF_LINES
from app.fleet.runs.events import EVENT_COLUMNS, event_insert_sql
from app.fleet.runs.feed import feed_insert_sql
from app.fleet.runs.notifications import notify_sql
from app.fleet.runs.retry_delay import usual_wait

DEATHS = 20
# How long after its deadline a run is taken from an instance that still lives.
SLACK = 8.0
STUCK_AFTER = 60.0

WAITING = f"""(
    SELECT action_id, priority, run_at FROM back UNION ALL SELECT * FROM {NEXT_OF_LINES}
) AS w"""

# A run that is to be cancelled is not given back: it would wait, and then end without being run.
ENDED_AS = "CASE WHEN r.cancel_requested_at IS NULL THEN 'failed' ELSE 'cancelled' END AS ended_as"


def ended_by(why: str) -> str:
    return f"CASE WHEN r.cancel_requested_at IS NULL THEN {why} ELSE 'cancelled on request' END AS ended_by"


TAKE_BACK = Statement(f"""
WITH lost AS MATERIALIZED (
    SELECT id, deaths + 1 >= {DEATHS} OR cancel_requested_at IS NOT NULL AS deadly
    FROM {{schema}}.runs
    WHERE state = 'running' AND instance_id = ANY (%(dead)s)
    LIMIT {BATCH}
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {{schema}}.runs AS r
    USING lost AS l
    WHERE r.id = l.id AND l.deadly
    RETURNING r.*, {ENDED_AS}, NULL AS ended_with, {
    ended_by("format('%%s instances died while they ran it, the last of them %%s', r.deaths + 1, r.instance)")
}
), failed AS (
    {INSERT_FINISHED}
), noted_failed AS (
    {FEED_INSERT_ENDED}
), back AS (
    UPDATE {{schema}}.runs AS r
    SET state = 'pending', deaths = r.deaths + 1, deadline_at = NULL, events = r.events + 1,
        error = format('the instance %%s died while it ran it', r.instance)
    FROM lost AS l
    WHERE r.id = l.id AND NOT l.deadly
    RETURNING {EVENT_COLUMNS}, r.action_id, r.priority, r.attempt AS ran, r.error AS why
), written AS (
    {event_insert_sql("back")}
), noted AS (
    {feed_insert_sql("back", "'pending'")}
), told AS (
    {notify_sql(WAITING)}
)
SELECT (SELECT count(*) FROM lost), (SELECT count(*) FROM told)
""")

FORGET_STANDBY = Statement("DELETE FROM {schema}.standby WHERE instance_id = ANY (%(dead)s)")

# Those of instances that are gone: found locked by the death's transaction, or left over when its leader ended.
ORPHANED = Statement("""
SELECT DISTINCT r.instance_id
FROM {schema}.runs AS r
WHERE r.state = 'running'
  AND NOT EXISTS (SELECT FROM {schema}.instances AS i WHERE i.id = r.instance_id AND i.state <> 'gone')
""")

END_OVERDUE = Statement(f"""
WITH lost AS MATERIALIZED (
    SELECT id, attempt - deaths >= max_attempts OR cancel_requested_at IS NOT NULL AS spent,
           format('exceeded its deadline, and its instance %%s did not end it: its event loop is blocked, or it hangs',
                  instance) AS why
    FROM {{schema}}.runs
    WHERE state = 'running' AND deadline_at < clock_timestamp() - make_interval(secs => %(slack)s)
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {{schema}}.runs AS r
    USING lost AS l
    WHERE r.id = l.id AND l.spent
    RETURNING r.*, {ENDED_AS}, NULL AS ended_with, {ended_by("l.why")}
), failed AS (
    {INSERT_FINISHED}
), noted_failed AS (
    {FEED_INSERT_ENDED}
), back AS (
    UPDATE {{schema}}.runs AS r
    SET state = 'pending', error = l.why, deadline_at = NULL, events = r.events + 1,
        run_at = clock_timestamp() + make_interval(secs => {usual_wait()})
    FROM lost AS l
    WHERE r.id = l.id AND NOT l.spent
    RETURNING {EVENT_COLUMNS}, r.action_id, r.priority, r.attempt AS ran, l.why
), written AS (
    {event_insert_sql("back")}
), noted AS (
    {feed_insert_sql("back", "'pending'")}
)
{notify_sql(WAITING)}
""")


# Its deadline is long over, and neither its instance nor any other has ended it.
STUCK = Statement("""
SELECT r.id, a.name, r.instance, r.deadline_at
FROM {schema}.runs AS r
JOIN {schema}.actions AS a ON a.id = r.action_id
WHERE r.state = 'running' AND r.deadline_at < clock_timestamp() - make_interval(secs => %(slack)s)
ORDER BY r.deadline_at
LIMIT 100
""")


class Rescue:
    """What a death means for runs; called in its transaction (`registry.GoneHook`)."""

    def __init__(self, namespace: Namespace) -> None:
        self._sql = namespace.sql

    def __call__(self, session: Session, dead: Sequence[int]) -> bool:
        session.execute(self._sql(FORGET_STANDBY), {"dead": list(dead)})
        row = session.execute(self._sql(TAKE_BACK), {"dead": list(dead)}).fetchone()
        return row is not None and row[0] == BATCH


async def stuck(connection: Connection, namespace: Namespace, _: Sequence[Instance]) -> list[Anomaly]:
    """Look for runs that should have been taken back long ago."""
    rows = await (await connection.execute(namespace.sql(STUCK), {"slack": STUCK_AFTER})).fetchall()
    return [
        Anomaly(
            "run_stuck",
            f"run {run_id}",
            deadline,
            f"{action} on {instance}: its deadline was {deadline:%Y-%m-%d %H:%M:%S %Z}, and nobody could take it back; "
            f"most often a transaction that is guarded by it is still open",
        )
        for run_id, action, instance, deadline in rows
    ]


async def sweep(connection: Connection, namespace: Namespace, *, slack: float = SLACK, overdue: bool = True) -> None:
    """Take back what the deaths' transactions had to leave, and, if `overdue`, what hangs beyond its deadline."""
    values: dict[str, Any] = {"slack": slack}
    if overdue:
        await connection.execute(namespace.sql(END_OVERDUE), values)
    rows = await (await connection.execute(namespace.sql(ORPHANED))).fetchall()
    taken = BATCH if rows else 0
    while taken == BATCH:
        cursor = await connection.execute(namespace.sql(TAKE_BACK), {"dead": [row[0] for row in rows]})
        ((taken, _),) = await cursor.fetchall()
