"""How a running run becomes pending again: retry, pause, a lost claim, the death of its instance, a missed deadline.

    statement          runs                             then                             if a cancellation is requested
    REQUEUE            of a batch, with the attempt's   pending: after its delay (a      left out; the run writer sends
                       token                            retry), or as before the claim   END_CANCELLED (`end.py`)
                                                        (a pause)
    UNDO_CLAIM         claimed by a statement whose     pending, as before the claim     pending; the next attempt is
                       answer was lost                                                   cancelled as it begins
    RESCUE_ORPHANED    of instances that are gone       pending; failed after            cancelled
                                                        MAX_DEATHS deaths
    RESCUE_OVERDUE     whose deadline is long over      pending after a delay, as if     cancelled
                                                        the action had raised; failed
                                                        without retries left

Each statement also stores the events of the attempt that is over, adds a row to the feed, and (except UNDO_CLAIM, whose
caller knows the runs) notifies the instances.

REQUEUE and the two rescues skip locked rows. An attempt's guarded transaction (`run.guard`) has locked the row of its
run, and the run is not rescued before that transaction ends; REQUEUE does not conflict with that lock. UNDO_CLAIM waits
for a locked row, but no attempt exists that could have locked it.

The token stays as it is; the next claim increments it. Until then late writes are refused because the run is not
`running`.
"""

from app.fleet.cluster.registry import BATCH
from app.fleet.db.namespace import Statement
from app.fleet.runs.effects.events import EVENT_COLUMNS, event_insert_sql
from app.fleet.runs.effects.feed import feed_insert_sql
from app.fleet.runs.effects.notifications import QUEUE_PRIORITY, notify_sql
from app.fleet.runs.effects.retry_delay import retry_delay_sql
from app.fleet.runs.effects.states import is_running
from app.fleet.runs.end import FEED_INSERT_ENDED, INSERT_FINISHED, NEXT_OF_ORDERED

# A run that makes its process crash (a bug in a C library, too much memory) would crash one instance after the other.
MAX_DEATHS = 20

# What `notify_sql` needs of a run, beside `EVENT_COLUMNS`.
QUEUE_COLUMNS = "r.action_id, r.priority, r.ordering_key"

REQUEUE = Statement(f"""
WITH own AS MATERIALIZED (
    SELECT r.id
    FROM {{schema}}.runs AS r
    WHERE r.id = ANY (%(ids)s::int8[]) AND {is_running()} AND r.cancel_requested_at IS NULL
    FOR NO KEY UPDATE SKIP LOCKED
), back AS (
    UPDATE {{schema}}.runs AS r
    SET state = 'pending',
        run_at = CASE
            WHEN b.paused THEN r.run_at
            ELSE clock_timestamp() + make_interval(secs => coalesce(b.delay, {retry_delay_sql()}))
        END,
        attempt = r.attempt - b.paused::int,
        error = coalesce(b.error, r.error),
        events = r.events + 1,
        deadline_at = NULL
    FROM unnest(%(ids)s::int8[], %(tokens)s::int8[], %(pauses)s::bool[], %(delays)s::float8[], %(errors)s::text[])
         AS b (id, token, paused, delay, error)
    WHERE r.id = ANY (ARRAY(SELECT id FROM own)) AND r.id = b.id AND r.token = b.token AND {is_running()}
    RETURNING {EVENT_COLUMNS}, {QUEUE_COLUMNS}, r.attempt + b.paused::int AS ran, b.error AS why
), written AS (
    {event_insert_sql("back")}
), feed_rows AS (
    {feed_insert_sql("back", "'pending'")}
), notified AS (
    {notify_sql("back", "%(heading)s::text")}
)
SELECT id FROM back, (SELECT count(*) FROM notified) AS n
""")

UNDO_CLAIM = Statement(f"""
WITH back AS (
    UPDATE {{schema}}.runs AS r
    SET state = 'pending', attempt = r.attempt - 1, deadline_at = NULL, events = r.events + 1
    FROM unnest(%(ids)s::int8[], %(tokens)s::int8[]) AS u (id, token)
    WHERE r.id = u.id AND r.token = u.token AND {is_running()}
    RETURNING {EVENT_COLUMNS}, {QUEUE_COLUMNS}, r.attempt + 1 AS ran,
              'the answer to its claim was lost on the way' AS why
), written AS (
    {event_insert_sql("back")}
), feed_rows AS (
    {feed_insert_sql("back", "'pending'")}
)
SELECT action_id, {QUEUE_PRIORITY}, run_at, id FROM back
""")

WAITING = f"""(
    SELECT action_id, priority, ordering_key, run_at FROM back UNION ALL SELECT * FROM {NEXT_OF_ORDERED}
) AS w"""

ENDED_AS = "CASE WHEN r.cancel_requested_at IS NULL THEN 'failed' ELSE 'cancelled' END AS ended_as"


def ended_by(error: str) -> str:
    return f"CASE WHEN r.cancel_requested_at IS NULL THEN {error} ELSE 'cancelled on request' END AS ended_by"


RESCUE_ORPHANED = Statement(f"""
WITH lost AS MATERIALIZED (
    SELECT id, deaths + 1 >= {MAX_DEATHS} OR cancel_requested_at IS NOT NULL AS deadly
    FROM {{schema}}.runs
    WHERE state = 'running' AND instance_id = ANY (%(dead)s)
    LIMIT {BATCH}
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM {{schema}}.runs AS r
    USING lost AS l
    WHERE r.id = l.id AND l.deadly
    RETURNING r.*, {ENDED_AS}, NULL AS ended_with, {
    ended_by("format('%%s instances died while they ran it, the last of them %%s', r.deaths + 1, r.instance)")
}
), failed AS (
    {INSERT_FINISHED}
), ended_feed_rows AS (
    {FEED_INSERT_ENDED}
), back AS (
    UPDATE {{schema}}.runs AS r
    SET state = 'pending', deaths = r.deaths + 1, deadline_at = NULL, events = r.events + 1,
        error = format('the instance %%s died while it ran it', r.instance)
    FROM lost AS l
    WHERE r.id = l.id AND NOT l.deadly
    RETURNING {EVENT_COLUMNS}, {QUEUE_COLUMNS}, r.attempt AS ran, r.error AS why
), written AS (
    {event_insert_sql("back")}
), feed_rows AS (
    {feed_insert_sql("back", "'pending'")}
), notified AS (
    {notify_sql(WAITING)}
)
SELECT (SELECT count(*) FROM lost), (SELECT count(*) FROM notified)
""")

RESCUE_OVERDUE = Statement(f"""
WITH lost AS MATERIALIZED (
    SELECT id, attempt - deaths >= max_attempts OR cancel_requested_at IS NOT NULL AS spent,
           format('exceeded its deadline, and its instance %%s did not end it: its event loop is blocked, or it hangs',
                  instance) AS why
    FROM {{schema}}.runs
    WHERE state = 'running' AND deadline_at < clock_timestamp() - make_interval(secs => %(slack)s)
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM {{schema}}.runs AS r
    USING lost AS l
    WHERE r.id = l.id AND l.spent
    RETURNING r.*, {ENDED_AS}, NULL AS ended_with, {ended_by("l.why")}
), failed AS (
    {INSERT_FINISHED}
), ended_feed_rows AS (
    {FEED_INSERT_ENDED}
), back AS (
    UPDATE {{schema}}.runs AS r
    SET state = 'pending', error = l.why, deadline_at = NULL, events = r.events + 1,
        run_at = clock_timestamp() + make_interval(secs => {retry_delay_sql()})
    FROM lost AS l
    WHERE r.id = l.id AND NOT l.spent
    RETURNING {EVENT_COLUMNS}, {QUEUE_COLUMNS}, r.attempt AS ran, l.why
), written AS (
    {event_insert_sql("back")}
), feed_rows AS (
    {feed_insert_sql("back", "'pending'")}
)
{notify_sql(WAITING)}
""")

# Runs of instances that are gone. The transaction that declared an instance gone found their rows locked, or the leader
# ended between two batches.
FIND_ORPHANED = Statement("""
SELECT DISTINCT r.instance_id
FROM {schema}.runs AS r
WHERE r.state = 'running'
  AND NOT EXISTS (SELECT FROM {schema}.instances AS i WHERE i.id = r.instance_id AND i.state <> 'gone')
""")
