"""Failed runs in groups: those of one action whose errors are alike.

Two errors are alike if they differ only in quoted texts and in words that have a digit or an `@`: numbers, ids, times,
addresses. Only the first 500 characters count. PostgreSQL computes a hash of the rest when a run ends, in the column
`finished_runs.alike`, however the run ends. So one bad deploy is one group, and a group is a range of an index.

Reading the groups skips from one group to the next in that index and counts at most `COUNTED` entries of each. So its
cost depends on the number of groups, not of runs. Groups come by action and hash; `MOST` of them are read.

Not guaranteed: that one cause is one group. An error whose text contains other words for each run, without quotes, is a
group for each.
"""

from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection

# Counting ends at one more than this.
COUNTED = 1000
MOST = 100
# Characters of the error.
SHOWN = 500

FIND_GROUPS = Statement(f"""
WITH RECURSIVE groups AS (
    (
        SELECT f.action_id, f.alike, 1 AS number
        FROM {{schema}}.finished_runs AS f
        WHERE f.alike IS NOT NULL AND f.action_id >= %(first_action)s
        ORDER BY f.action_id, f.alike
        LIMIT 1
    )
    UNION ALL
    SELECT n.action_id, n.alike, g.number + 1
    FROM groups AS g, LATERAL (
        SELECT f.action_id, f.alike
        FROM {{schema}}.finished_runs AS f
        WHERE f.alike IS NOT NULL AND (f.action_id, f.alike) > (g.action_id, g.alike)
        ORDER BY f.action_id, f.alike
        LIMIT 1
    ) AS n
    WHERE g.number <= {MOST} AND n.action_id <= %(last_action)s
)
SELECT a.name AS action, g.alike, c.runs, newest.id AS newest, newest.finished_at AS newest_at,
       left(newest.error, {SHOWN}) AS error, oldest.finished_at AS oldest_at
FROM groups AS g
JOIN {{schema}}.actions AS a ON a.id = g.action_id
CROSS JOIN LATERAL (
    -- The next entries of the index, whichever group they are of: with an upper bound, the planner may read all runs of
    -- the action, because it assumes that the group has most of them.
    SELECT count(*) AS runs
    FROM (
        SELECT f.action_id, f.alike
        FROM {{schema}}.finished_runs AS f
        WHERE f.alike IS NOT NULL AND (f.action_id, f.alike, f.id) > (g.action_id, g.alike, 0)
        ORDER BY f.action_id, f.alike, f.id
        LIMIT {COUNTED + 1}
    ) AS f
    WHERE f.action_id = g.action_id AND f.alike = g.alike
) AS c
CROSS JOIN LATERAL (
    SELECT f.id, f.finished_at, f.error
    FROM {{schema}}.finished_runs AS f
    WHERE f.alike IS NOT NULL AND (f.action_id, f.alike, f.id) > (g.action_id, g.alike, 0)
      AND (f.action_id, f.alike, f.id) <= (g.action_id, g.alike, {2**63 - 1})
    ORDER BY f.action_id DESC, f.alike DESC, f.id DESC
    LIMIT 1
) AS newest
CROSS JOIN LATERAL (
    SELECT f.finished_at
    FROM {{schema}}.finished_runs AS f
    WHERE f.alike IS NOT NULL AND (f.action_id, f.alike, f.id) > (g.action_id, g.alike, 0)
      AND (f.action_id, f.alike, f.id) <= (g.action_id, g.alike, {2**63 - 1})
    ORDER BY f.action_id, f.alike, f.id
    LIMIT 1
) AS oldest
""")


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Failed runs of one action with errors that are alike."""

    action: str
    alike: int
    # At most COUNTED + 1.
    runs: int
    # The run with the highest id, when it ended, and its error; when the run with the lowest id ended.
    newest: int
    newest_at: datetime
    error: str | None
    oldest_at: datetime


async def find_groups(connection: Connection, namespace: Namespace, action_id: int | None = None) -> list[ErrorGroup]:
    """Return at most MOST + 1 groups, of all actions or of one, the group with the newest failure first."""
    values = {"first_action": action_id or 0, "last_action": action_id or 2**31 - 1}
    async with connection.cursor(row_factory=class_row(ErrorGroup)) as cursor:
        # Planned for the tables as they are: a generic plan may read all failed runs.
        await cursor.execute(namespace.sql(FIND_GROUPS), values, prepare=False)
        return sorted(await cursor.fetchall(), key=lambda each: each.newest_at, reverse=True)
