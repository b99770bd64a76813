"""How an old run is deleted, with its events, tracebacks and keys, when its retention is over.

A run that was retried meanwhile is no longer in `finished_runs`, or has another `expires_at`. A run with very many
events is marked first: its `expires_at` becomes the epoch, and from then on it can neither be retried nor followed.
Then its events are deleted in parts, and at last the run.
"""

from app.fleet.db.namespace import Statement

EXPIRED = Statement("""
SELECT id, events, expires_at
FROM {schema}.finished_runs
WHERE expires_at >= %(floor)s AND expires_at < statement_timestamp()
ORDER BY expires_at
LIMIT %(batch)s
""")

PRUNE = Statement("""
WITH old AS MATERIALIZED (
    SELECT id
    FROM {schema}.finished_runs
    WHERE id = ANY (%(ids)s::int8[]) AND expires_at < statement_timestamp()
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM {schema}.finished_runs WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
), events AS (
    DELETE FROM {schema}.run_events WHERE run_id = ANY (ARRAY(SELECT id FROM old))
), tracebacks AS (
    DELETE FROM {schema}.run_tracebacks WHERE run_id = ANY (ARRAY(SELECT id FROM old))
), keys AS (
    DELETE FROM {schema}.run_keys WHERE run_id = ANY (ARRAY(SELECT id FROM old))
)
SELECT id FROM removed
""")

MARK = Statement("""
UPDATE {schema}.finished_runs
SET expires_at = 'epoch'
WHERE id = (
    SELECT id
    FROM {schema}.finished_runs
    WHERE id = %(id)s AND expires_at < statement_timestamp()
    FOR UPDATE SKIP LOCKED
)
RETURNING id
""")

PRUNE_EVENTS = Statement("""
DELETE FROM {schema}.run_events
WHERE run_id = %(id)s AND seq > %(after)s AND seq <= %(upto)s
""")
