"""Synchronisation: at every start, an instance writes its actions' declarations to the database.

One statement inserts the actions that the database does not have, in the order of their names. Another one updates the
actions whose declaration has changed, in the order of their ids, as all statements do. So instances that start at the
same time can wait for each other but do not deadlock. The scheduler and claims do not wait for the row of an action, so
they cannot be part of a deadlock. If PostgreSQL reports one nevertheless, the start is repeated (`engine/engine.py`).

Only a new action draws an id: ids have 28 bits and are never reused.

    changed option      effect
    `every`             the next slot is the old one, or one interval from now, whichever is earlier. Otherwise, two
                        releases that start alternately, more often than the interval, would postpone it for ever
    `cron`              the next slot is the next one of the expression
    no schedule option  the next slot stays, however often instances restart
    `rate`, `burst`     apply from the next claim: the starts that count against the old rate count against the new
                        one, but no more of them than the new one allows at once

A pause belongs to the operator and stays. An action that the code no longer has keeps its row and its runs; no instance
claims or schedules it.

While instances of different releases run, all of them use the declaration that was written last: the scheduler and the
limits read it from the table.
"""

import json
from datetime import datetime
from typing import Any

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.duration import RATE_TOLERANCE
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.catalogue import Catalogue

READ_CLOCK = Statement("SELECT clock_timestamp()")

DECLARED = """jsonb_to_recordset(%(declared)s::jsonb) AS d (
    name text, schedule text, misfire text, overlap text, priority int, max_attempts int, retention float8,
    concurrency int, rate_interval float8, rate_burst int, next_run_at timestamptz, anchored bool, retry_delay float8,
    max_retry_delay float8
)"""

# Another instance may insert the same actions at the same time: the second one waits for the first, and inserts
# nothing; then it compares the declarations.
INSERT = Statement(f"""
INSERT INTO {{schema}}.actions (
    name, schedule, misfire, overlap, priority, max_attempts, retention, concurrency, rate_interval, rate_burst,
    next_run_at, retry_delay, max_retry_delay
)
SELECT d.name, d.schedule, d.misfire, d.overlap, d.priority, d.max_attempts, make_interval(secs => d.retention),
       d.concurrency, d.rate_interval, d.rate_burst, d.next_run_at, d.retry_delay, d.max_retry_delay
FROM {DECLARED}
WHERE NOT EXISTS (SELECT FROM {{schema}}.actions AS a WHERE a.name = d.name)
ORDER BY d.name
ON CONFLICT (name) DO NOTHING
""")

UPDATE = Statement(f"""
WITH changed AS MATERIALIZED (
    SELECT a.id, d.*
    FROM {{schema}}.actions AS a
    JOIN {DECLARED} ON d.name = a.name
    WHERE (a.schedule, a.misfire, a.overlap, a.priority, a.max_attempts, a.retention, a.concurrency, a.rate_interval,
           a.rate_burst, a.retry_delay, a.max_retry_delay)
          IS DISTINCT FROM
          (d.schedule, d.misfire, d.overlap, d.priority, d.max_attempts, make_interval(secs => d.retention),
           d.concurrency, d.rate_interval, d.rate_burst, d.retry_delay, d.max_retry_delay)
    ORDER BY a.id
    FOR NO KEY UPDATE OF a
)
UPDATE {{schema}}.actions AS a
SET schedule = d.schedule,
    misfire = d.misfire,
    overlap = d.overlap,
    priority = d.priority,
    max_attempts = d.max_attempts,
    retention = make_interval(secs => d.retention),
    concurrency = d.concurrency,
    rate_interval = d.rate_interval,
    rate_burst = d.rate_burst,
    retry_delay = d.retry_delay,
    max_retry_delay = d.max_retry_delay,
    rate_used_until = CASE
        WHEN (a.rate_interval, a.rate_burst) IS NOT DISTINCT FROM (d.rate_interval, d.rate_burst)
        THEN a.rate_used_until
        WHEN a.rate_interval IS NULL OR a.rate_used_until IS NULL THEN NULL
        ELSE clock_timestamp() + make_interval(secs => greatest(0, least(
            d.rate_burst * d.rate_interval + {RATE_TOLERANCE},
            extract(epoch FROM a.rate_used_until - clock_timestamp())::float8 / a.rate_interval * d.rate_interval
        )))
    END,
    next_run_at = CASE
        WHEN a.schedule IS NOT DISTINCT FROM d.schedule THEN a.next_run_at
        WHEN d.anchored THEN least(a.next_run_at, d.next_run_at)
        ELSE d.next_run_at
    END
FROM changed AS d
WHERE a.id = d.id
""")

READ_IDS = Statement("SELECT name, id FROM {schema}.actions WHERE name = ANY (%(names)s)")

ANNOUNCE = Statement("""
INSERT INTO {schema}.standby (instance_id, action_ids)
SELECT id, %(actions)s FROM {schema}.instances WHERE id = %(me)s AND state <> 'gone' FOR KEY SHARE
ON CONFLICT (instance_id) DO UPDATE SET action_ids = excluded.action_ids
""")


async def synchronise(connection: Connection, namespace: Namespace, catalogue: Catalogue) -> None:
    """Write the declarations, and read the ids."""
    row = await (await connection.execute(namespace.sql(READ_CLOCK))).fetchone()
    assert row is not None
    declared = json.dumps([declaration(action, row[0]) for action in catalogue])
    for statement in (INSERT, UPDATE):
        await connection.execute(namespace.sql(statement), {"declared": declared})
    await read_ids(connection, namespace, catalogue)


async def read_ids(connection: Connection, namespace: Namespace, catalogue: Catalogue) -> None:
    """Read the ids of the actions that are in the database, and write nothing."""
    names = [action.name for action in catalogue]
    rows = await (await connection.execute(namespace.sql(READ_IDS), {"names": names})).fetchall()
    catalogue.set_ids(dict(rows))


def declaration(action: Action[Any], now: datetime) -> dict[str, Any]:
    schedule = action.schedule
    return {
        "name": action.name,
        "schedule": None if schedule is None else str(schedule),
        "misfire": action.misfire,
        "overlap": action.overlap,
        "priority": action.priority,
        "max_attempts": action.max_attempts,
        "retention": action.retention,
        "concurrency": action.max_running,
        "rate_interval": None if action.rate is None else action.rate.interval,
        "rate_burst": None if action.rate is None else action.rate.burst,
        "next_run_at": None if schedule is None else schedule.after(now).isoformat(),
        "retry_delay": action.retry_delay,
        "max_retry_delay": action.max_retry_delay,
        "anchored": schedule is not None and schedule.every is not None,
    }


async def announce(connection: Connection, namespace: Namespace, me: int, actions: list[int]) -> None:
    """Write which actions this instance has in its code."""
    await connection.execute(namespace.sql(ANNOUNCE), {"me": me, "actions": actions})
