"""How a run leaves the hot path: its row moves from `runs` to `finished_runs`, in one statement.

Whoever ends a run deletes its row first, in a CTE called `gone` that has `ended_as`, `ended_with` and `ended_by` beside
the row's own columns, under whatever condition makes that right; this is the other half. A process that dies between
the two halves does not exist: they are one statement. That it ended stands in its row, and in the feed.
"""

from app.fleet.runs.feed import feed_insert_sql

FEED_INSERT_ENDED = feed_insert_sql("gone", "ended_as", "events + 1")

# Those that may be the next in the lines of what has ended, for `tell`. Where an attempt has ended here, its instance
# knows; this is for an end that comes from elsewhere.
NEXT_OF_LINES = """(
    SELECT action_id, priority, clock_timestamp() AS run_at FROM gone WHERE ordering_key IS NOT NULL
) AS n"""

INSERT_FINISHED = """
INSERT INTO {schema}.finished_runs (
    id, action_id, state, priority, run_at, token, instance, attempt, max_attempts, trigger, scheduled_for, key,
    ordering_key, payload, checkpoint, progress, result, error, events, running_seq, created_at, started_at,
    finished_at, expires_at
)
SELECT g.id, g.action_id, g.ended_as, g.priority, g.run_at, g.token, g.instance, g.attempt, g.max_attempts, g.trigger,
       g.scheduled_for, g.key, g.ordering_key, g.payload, g.checkpoint, g.progress, g.ended_with::json, g.ended_by,
       g.events + 1, g.running_seq, g.created_at, g.started_at, clock_timestamp(),
       clock_timestamp() + (SELECT retention FROM {schema}.actions AS a WHERE a.id = g.action_id)
FROM gone AS g
"""
