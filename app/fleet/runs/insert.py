"""Inserting runs: the transition from an order to a pending run.

One statement inserts a batch of runs, their row in the feed, and the notification that they are pending. It runs in the
caller's transaction: the runs exist exactly if that transaction commits, and PostgreSQL delivers the notification only
then.

    statement                       used for
    INSERT                          runs without a key
    INSERT_ORDERED                  the same, some of them with an ordering key
    INSERT_NUMBERED                 runs with a key: their ids were drawn when the keys were taken
    INSERT_ORDERED_NUMBERED         the same, some of them with an ordering key

With a mark, the statement also inserts a row into `run_keys` that has the ids of the runs. If the connection breaks
before the commit is confirmed, that row shows whether the transaction was committed (`engine/enqueue/confirm.py`).

The scheduler inserts the runs of slots by a statement of its own (`engine/dispatch/scheduler.py`).
"""

from app.fleet.db.namespace import Statement
from app.fleet.runs.feed import feed_insert_sql
from app.fleet.runs.notifications import notify_sql


def insert_sql(columns: str = "", arrays: str = "") -> str:
    """Return the statement that inserts runs; `columns` and `arrays` are those in addition to the usual ones."""
    return f"""
WITH added AS (
    INSERT INTO {{schema}}.runs ({columns}action_id, priority, run_at, max_attempts, payload, trigger)
    SELECT {columns}action_id, priority, coalesce(run_at, now()), max_attempts, payload::json, %(trigger)s
    FROM unnest({arrays}%(actions)s::int[], %(priorities)s::int[], %(run_ats)s::timestamptz[],
                %(max_attempts)s::int[], %(payloads)s::text[])
         WITH ORDINALITY AS o ({columns}action_id, priority, run_at, max_attempts, payload, ordinal)
    ORDER BY ordinal
    RETURNING id, run_at, created_at, action_id, priority, events, attempt, instance
), feed_rows AS (
    {feed_insert_sql("added", "'pending'")}
), notified AS (
    {notify_sql("added")}
), marked AS (
    INSERT INTO {{schema}}.run_keys (action_id, key, run_id, digest)
    SELECT 0, %(mark)s::text, min(id), string_agg(id::text, ',' ORDER BY id)
    FROM added
    WHERE %(mark)s::text IS NOT NULL
    HAVING count(*) > 0
)
SELECT id, run_at, created_at FROM added, (SELECT count(*) FROM notified) AS n ORDER BY id
"""


INSERT = Statement(insert_sql())
INSERT_ORDERED = Statement(insert_sql("ordering_key, ", "%(ordering_keys)s::text[], "))
INSERT_NUMBERED = Statement(insert_sql("id, key, ", "%(ids)s::int8[], %(keys)s::text[], "))
INSERT_ORDERED_NUMBERED = Statement(
    insert_sql("id, key, ordering_key, ", "%(ids)s::int8[], %(keys)s::text[], %(ordering_keys)s::text[], ")
)
