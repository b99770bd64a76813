"""How a run ends: its row moves from `runs` to `finished_runs`, in one statement.

A statement that ends runs deletes their rows in a CTE called `removed`, under the condition that allows it, and returns
`ended_as`, `ended_with` and `ended_by` beside the row's own columns. `INSERT_FINISHED` is the other half. Because both
halves are one statement, no crash can separate them. The end is in the row and in the feed.

    statement             ends                                                   condition
    FINISH                the runs of a batch, without locking their rows first  state `running` and the attempt's token
    FINISH_SKIP_LOCKED    the same, without rows that are locked elsewhere       the same
    COMPLETE              one run, in the transaction of its effects             the same
    END_CANCELLED         runs whose attempt failed or paused after a request    the same, and the request
                          to cancel them
    CONFIRM               nothing: returns the runs that ended, or became        the token
                          pending, with a given token
"""

from app.fleet.db.namespace import Statement
from app.fleet.runs.effects.feed import feed_insert_sql
from app.fleet.runs.effects.states import is_running

# How long FINISH waits for a row that another transaction has locked.
LOCK_TIMEOUT_MS = 10

FEED_INSERT_ENDED = feed_insert_sql("removed", "ended_as", "events + 1")

# The ordering keys of the ended runs, for `notify_sql`: their next runs may be claimed now. When an attempt ends here,
# its own instance knows that; a notification is for an end that another instance or an operator makes.
NEXT_OF_ORDERED = """(
    SELECT action_id, priority, ordering_key, clock_timestamp() AS run_at FROM removed WHERE ordering_key IS NOT NULL
) AS n"""

INSERT_FINISHED = """
INSERT INTO {schema}.finished_runs (
    id, action_id, state, priority, run_at, token, instance, attempt, max_attempts, trigger, scheduled_for, key,
    ordering_key, payload, checkpoint, progress, result, error, events, running_seq, created_at, started_at,
    triggered_by, request_id, trace_parent, finished_at, expires_at
)
SELECT r.id, r.action_id, r.ended_as, r.priority, r.run_at, r.token, r.instance, r.attempt, r.max_attempts, r.trigger,
       r.scheduled_for, r.key, r.ordering_key, r.payload, r.checkpoint, r.progress, r.ended_with::json, r.ended_by,
       r.events + 1, r.running_seq, r.created_at, r.started_at, r.triggered_by, r.request_id, r.trace_parent,
       clock_timestamp(), clock_timestamp() + (SELECT retention FROM {schema}.actions AS a WHERE a.id = r.action_id)
FROM removed AS r
"""


# These statements find a row by its id and by nothing else, whatever the planner knows of the table: while the table is
# empty, a walk through another index seems to cost nothing, and under a held snapshot that walk is long. Hence `= ANY`
# beside the join, and `is_running`, which the planner cannot match with a partial index.
def finish_sql(condition: str, before: str = "") -> str:
    """Return the statement that ends the given runs that meet the condition; `before` is a CTE that it needs."""
    return f"""
WITH {before}ended AS (
    SELECT *
    FROM unnest(%(ids)s::int8[], %(tokens)s::int8[], %(states)s::text[], %(results)s::text[], %(errors)s::text[])
         AS e (id, token, state, result, error)
), removed AS (
    DELETE FROM {{schema}}.runs AS r
    USING ended AS e
    WHERE {condition} AND r.id = e.id AND r.token = e.token AND {is_running()}
    RETURNING r.*, coalesce(e.state, 'succeeded') AS ended_as, e.result AS ended_with, e.error AS ended_by
), feed_rows AS (
    {FEED_INSERT_ENDED}
)
{INSERT_FINISHED}"""


def finish_skip_locked_sql(condition: str = "true") -> str:
    """Return the statement that ends the given runs, and leaves out those whose rows another transaction has locked."""
    before = f"""own AS MATERIALIZED (
    SELECT r.id
    FROM {{schema}}.runs AS r
    WHERE r.id = ANY (%(ids)s::int8[]) AND {is_running()} AND {condition}
    FOR UPDATE SKIP LOCKED
), """
    return finish_sql("r.id = ANY (ARRAY(SELECT id FROM own))", before)


GIVEN = "r.id = ANY (%(ids)s::int8[])"
# Usually no other transaction has locked one of these rows. Locking each row first would take a tenth of the
# statement's time. So FINISH does not; if it has to wait for longer than LOCK_TIMEOUT_MS, it fails, and
# FINISH_SKIP_LOCKED is sent instead.
FINISH = Statement(finish_sql(f"(SELECT set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true)) <> '' AND {GIVEN}"))
FINISH_SKIP_LOCKED = Statement(finish_skip_locked_sql())
# In the transaction of the run's effects, which is the caller's own. It waits for another transaction that `run.guard`
# has joined to the run. RETURNING, because SQLAlchemy does not report how many rows a statement without it has changed.
COMPLETE = Statement(finish_sql(GIVEN) + "RETURNING id")
# Instead of a requeue: a run that is to be cancelled would wait for its delay, and then end without being executed.
END_CANCELLED = Statement(finish_skip_locked_sql("r.cancel_requested_at IS NOT NULL") + "RETURNING id")

# A claim draws a token once, so only the attempt that had this token can have made the change.
CONFIRM = Statement("""
SELECT w.id
FROM unnest(%(ids)s::int8[], %(tokens)s::int8[]) AS w (id, token)
WHERE EXISTS (SELECT FROM {schema}.finished_runs AS f WHERE f.id = w.id AND f.token = w.token)
   OR (%(returned)s AND EXISTS (
       SELECT FROM {schema}.runs AS r WHERE r.id = w.id AND r.token = w.token AND r.state = 'pending'
   ))
""")
