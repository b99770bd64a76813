"""What the code declares becomes what the database says, at every start.

One statement for all actions, in the order of their names, so that instances that start together wait for each other
and never in a circle. A changed schedule gets its next slot anew; one that is unchanged keeps it, whoever restarts how
often, so that a long interval is not put off by frequent deploys. A pause is the operator's and is left alone. An
action that the code has no more stays in the table with its runs; it is claimed and scheduled by nobody.

While releases are mixed, the last instance to start decides, for all: scheduling and limits go by the table.
"""

import json
from datetime import datetime
from typing import Any

from app.fleet.db.namespace import Namespace
from app.fleet.db.pool import Connection
from app.fleet.engine.actions import Action, Catalogue

NOW = "SELECT clock_timestamp()"

SYNCHRONISE = """
INSERT INTO {schema}.actions AS a (
    name, schedule, misfire, overlap, priority, max_attempts, retention, concurrency, rate_interval, rate_burst,
    next_run_at
)
SELECT d.name, d.schedule, d.misfire, d.overlap, d.priority, d.max_attempts, make_interval(secs => d.retention),
       d.concurrency, d.rate_interval, d.rate_burst, d.next_run_at
FROM jsonb_to_recordset(%(declared)s::jsonb) AS d (
    name text, schedule text, misfire text, overlap text, priority int, max_attempts int, retention float8,
    concurrency int, rate_interval float8, rate_burst int, next_run_at timestamptz
)
ORDER BY d.name
ON CONFLICT (name) DO UPDATE
SET schedule = excluded.schedule,
    misfire = excluded.misfire,
    overlap = excluded.overlap,
    priority = excluded.priority,
    max_attempts = excluded.max_attempts,
    retention = excluded.retention,
    concurrency = excluded.concurrency,
    rate_interval = excluded.rate_interval,
    rate_burst = excluded.rate_burst,
    next_run_at = CASE WHEN a.schedule IS DISTINCT FROM excluded.schedule THEN excluded.next_run_at
                       ELSE a.next_run_at END
WHERE (a.schedule, a.misfire, a.overlap, a.priority, a.max_attempts, a.retention, a.concurrency, a.rate_interval,
       a.rate_burst)
      IS DISTINCT FROM
      (excluded.schedule, excluded.misfire, excluded.overlap, excluded.priority, excluded.max_attempts,
       excluded.retention, excluded.concurrency, excluded.rate_interval, excluded.rate_burst)
"""

IDS = "SELECT name, id FROM {schema}.actions WHERE name = ANY (%(names)s)"

ANNOUNCE = """
INSERT INTO {schema}.standby (instance_id, action_ids)
SELECT id, %(actions)s FROM {schema}.instances WHERE id = %(me)s AND state <> 'gone' FOR KEY SHARE
ON CONFLICT (instance_id) DO UPDATE SET action_ids = excluded.action_ids
"""


async def synchronise(connection: Connection, namespace: Namespace, catalogue: Catalogue) -> None:
    """Write what is declared, and learn the ids."""
    row = await (await connection.execute(namespace.sql(NOW))).fetchone()
    assert row is not None
    declared = json.dumps([declaration(action, row[0]) for action in catalogue])
    await connection.execute(namespace.sql(SYNCHRONISE), {"declared": declared})
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
    }


async def announce(connection: Connection, namespace: Namespace, me: int, actions: list[int]) -> None:
    """Say which actions this instance stands by for."""
    await connection.execute(namespace.sql(ANNOUNCE), {"me": me, "actions": actions})
