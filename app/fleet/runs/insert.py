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

INSERT_SLOTS inserts the runs of due slots, for the scheduler (`engine/dispatch/scheduler.py`). The key of a slot is
unique, so a slot has one run at most.
"""

from app.fleet.db.namespace import Statement
from app.fleet.runs.effects.feed import feed_insert_sql
from app.fleet.runs.effects.notifications import notify_sql
from app.fleet.runs.overlap import active_run


def insert_sql(columns: str = "", arrays: str = "") -> str:
    """Return the statement that inserts runs; `columns` and `arrays` are those in addition to the usual ones."""
    return f"""
WITH added AS (
    INSERT INTO {{schema}}.runs ({columns}action_id, priority, run_at, max_attempts, payload, trigger,
                               triggered_by, request_id, trace_parent)
    SELECT {columns}action_id, priority, coalesce(run_at, now()), max_attempts, payload::json, %(trigger)s,
           %(triggered_by)s::int8, %(request_id)s::text, %(trace_parent)s::text
    FROM unnest({arrays}%(actions)s::int[], %(priorities)s::int[], %(run_ats)s::timestamptz[],
                %(max_attempts)s::int[], %(payloads)s::text[])
         WITH ORDINALITY AS o ({columns}action_id, priority, run_at, max_attempts, payload, ordinal)
    ORDER BY ordinal
    RETURNING id, run_at, created_at, action_id, priority, ordering_key, events, attempt, instance
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

# A slot of an action with overlap="skip" (`alone`) is left out while a run of the action is active.
INSERT_SLOTS = Statement(f"""
WITH slots AS MATERIALIZED (
    SELECT *, 'slot:' || to_char(slot AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US') AS key
    FROM unnest(%(actions)s::int[], %(slots)s::timestamptz[], %(jitters)s::float8[], %(alone)s::bool[])
         AS s (action_id, slot, jitter, alone)
    WHERE NOT (alone AND {active_run("s.action_id")} IS NOT NULL)
), new AS (
    INSERT INTO {{schema}}.run_keys (action_id, key, run_id)
    SELECT action_id, key, nextval('{{schema}}.runs_id_seq')
    FROM slots
    ORDER BY action_id, slot
    ON CONFLICT DO NOTHING
    RETURNING action_id, key, run_id
), added AS (
    INSERT INTO {{schema}}.runs (id, action_id, priority, run_at, max_attempts, trigger, scheduled_for)
    SELECT n.run_id, s.action_id, a.priority, s.slot + make_interval(secs => s.jitter * random()), a.max_attempts,
           'schedule', s.slot
    FROM new AS n
    JOIN slots AS s ON s.action_id = n.action_id AND s.key = n.key
    JOIN {{schema}}.actions AS a ON a.id = s.action_id
    RETURNING id, action_id, priority, ordering_key, run_at, events, attempt, instance
), feed_rows AS (
    {feed_insert_sql("added", "'pending'")}
), notified AS (
    {notify_sql("added")}
)
SELECT (SELECT count(*) FROM added), (SELECT count(*) FROM notified)
""")
