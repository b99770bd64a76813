"""The writes of an attempt while it runs: checkpoints, the guard of a transaction, the traceback of its failure.

Each statement requires the run's id, its token and the state `running`. An attempt whose run was taken over matches no
row. Events have the same condition (`effects/events.py`).
"""

from app.fleet.db.namespace import Statement
from app.fleet.runs.effects.states import is_running

# How many tracebacks a run keeps: those of its last claims.
MAX_TRACEBACKS = 20

CHECKPOINT = Statement(f"""
WITH own AS MATERIALIZED (
    SELECT r.id
    FROM {{schema}}.runs AS r
    WHERE r.id = ANY (%(ids)s::int8[]) AND {is_running()}
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {{schema}}.runs AS r
SET checkpoint = c.state::json
FROM unnest(%(ids)s::int8[], %(tokens)s::int8[], %(states)s::text[]) AS c (id, token, state)
WHERE r.id = ANY (ARRAY(SELECT id FROM own)) AND r.id = c.id AND r.token = c.token AND {is_running()}
RETURNING r.id, r.token
""")

# Which of these runs still run with this token, and how many events each has: their rows were locked and skipped, or
# their events were written by a statement whose answer was lost.
STILL_OURS = Statement(f"""
SELECT r.id, r.events
FROM {{schema}}.runs AS r
JOIN unnest(%(ids)s::int8[], %(tokens)s::int8[]) AS w (id, token) USING (id, token)
WHERE r.id = ANY (%(ids)s) AND {is_running()}
""")

# KEY SHARE: a statement that takes the run over (a rescue, a claim) locks its row FOR UPDATE, and skips it while this
# lock is held. Checkpoints and REQUEUE update no key column, so they do not conflict with this lock.
GUARD = Statement(f"""
SELECT id FROM {{schema}}.runs AS r WHERE id = %(id)s AND token = %(token)s AND {is_running()} FOR KEY SHARE
""")

# Sent before the statement after which the run is no longer running with this token. A statement that is sent again
# stores nothing, and neither does an attempt whose run was taken over. Each claim increments the token by one.
STORE_TRACEBACKS = Statement(f"""
WITH stored AS (
    INSERT INTO {{schema}}.run_tracebacks (run_id, token, attempt, instance, error, traceback)
    SELECT r.id, r.token, r.attempt, r.instance, t.error, t.traceback
    FROM {{schema}}.runs AS r
    JOIN unnest(%(ids)s::int8[], %(tokens)s::int8[], %(errors)s::text[], %(tracebacks)s::text[])
         AS t (id, token, error, traceback) USING (id, token)
    WHERE r.id = ANY (%(ids)s::int8[]) AND {is_running()}
    ON CONFLICT DO NOTHING
    RETURNING run_id, token
)
DELETE FROM {{schema}}.run_tracebacks AS t
USING stored AS s
WHERE t.run_id = ANY (%(ids)s::int8[]) AND t.run_id = s.run_id AND t.token <= s.token - {MAX_TRACEBACKS}
""")
