"""What the code declares becomes what the database says, at every start.

Two statements: one adds the actions that the database does not have, in the order of their names; one changes those
that were declared otherwise before, in the order of their ids, as everywhere. So instances that start together wait for
each other and never in a circle. The scheduler and claims never wait for an action's row, so neither can be
part of a circle. A start that the server ends for a deadlock all the same is repeated (`engine/engine.py`).

Only a new action draws an id: ids have 28 bits and are never reused.

    what was declared otherwise     then
    `every`                         the next slot is the old one or one interval from now, whichever is earlier: two
                                    releases that take turns, with restarts more frequent than the interval, would
                                    otherwise put it off for ever
    `cron`                          the next slot is the next one of the expression
    nothing about the schedule      the next slot stays, however often the instances restart
    `rate`                          holds from the next claim on: as many starts as count against the old one count
                                    against the new one, and never more than it allows at once

A pause is the operator's and is left alone. An action that the code has no more stays in the table with its runs; it
is claimed and scheduled by nobody.

While releases are mixed, the last instance to start decides, for all: scheduling and limits go by the table.
"""

import json
from datetime import datetime
from typing import Any

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Connection
from app.fleet.engine.actions.action import Action, Catalogue

NOW = Statement("SELECT clock_timestamp()")

DECLARED = """jsonb_to_recordset(%(declared)s::jsonb) AS d (
    name text, schedule text, misfire text, overlap text, priority int, max_attempts int, retention float8,
    concurrency int, rate_interval float8, rate_burst int, next_run_at timestamptz, anchored bool, retry_delay float8,
    max_retry_delay float8
)"""

# Another instance that starts at this moment may add the same ones: the second waits for the first, and then compares.
ADD = Statement(f"""
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

CHANGE = Statement(f"""
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
        ELSE clock_timestamp() + make_interval(secs => d.rate_interval * least(
            d.rate_burst, extract(epoch FROM a.rate_used_until - clock_timestamp())::float8 / a.rate_interval
        ))
    END,
    next_run_at = CASE
        WHEN a.schedule IS NOT DISTINCT FROM d.schedule THEN a.next_run_at
        WHEN d.anchored THEN least(a.next_run_at, d.next_run_at)
        ELSE d.next_run_at
    END
FROM changed AS d
WHERE a.id = d.id
""")

IDS = Statement("SELECT name, id FROM {schema}.actions WHERE name = ANY (%(names)s)")

ANNOUNCE = Statement("""
INSERT INTO {schema}.standby (instance_id, action_ids)
SELECT id, %(actions)s FROM {schema}.instances WHERE id = %(me)s AND state <> 'gone' FOR KEY SHARE
ON CONFLICT (instance_id) DO UPDATE SET action_ids = excluded.action_ids
""")


async def synchronise(connection: Connection, namespace: Namespace, catalogue: Catalogue) -> None:
    """Write what is declared, and learn the ids."""
    row = await (await connection.execute(namespace.sql(NOW))).fetchone()
    assert row is not None
    declared = json.dumps([declaration(action, row[0]) for action in catalogue])
    for statement in (ADD, CHANGE):
        await connection.execute(namespace.sql(statement), {"declared": declared})
    await learn_ids(connection, namespace, catalogue)


async def learn_ids(connection: Connection, namespace: Namespace, catalogue: Catalogue) -> None:
    """Learn the ids of those that the database has, and write nothing."""
    names = [action.name for action in catalogue]
    rows = await (await connection.execute(namespace.sql(IDS), {"names": names})).fetchall()
    catalogue.number(dict(rows))


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
        "concurrency": action.at_once,
        "rate_interval": None if action.rate is None else action.rate.interval,
        "rate_burst": None if action.rate is None else action.rate.burst,
        "next_run_at": None if schedule is None else schedule.after(now).isoformat(),
        "retry_delay": action.retry_delay,
        "max_retry_delay": action.max_retry_delay,
        "anchored": schedule is not None and schedule.every is not None,
    }


async def announce(connection: Connection, namespace: Namespace, me: int, actions: list[int]) -> None:
    """Say which actions this instance stands by for."""
    await connection.execute(namespace.sql(ANNOUNCE), {"me": me, "actions": actions})
