"""The statements of the seen-store: a key is a row of `once_keys`.

    state       meaning
    (no row)    the key is free
    free        the key is free; the row remains until it is pruned, because of its token
    pending     the owner's block is processing the key; if the owner has ended, the key is free
    seen        the key was processed; free again after `expires_at`

Guarantee: of several blocks that take a key at the same time, exactly one gets it.
    If there is no row, the second insert waits for the first, by the primary key, and then meets a row. `TAKE` updates
    a row by `ON CONFLICT DO UPDATE`, which waits for the row and sees its newest version. But `TAKE` reads whether an
    owner has ended in its own snapshot, and an owner that began later is not in this snapshot and looks ended. Hence
    the token: a block draws it before `TAKE` begins, and takes a key only from a lower token. An owner with a lower
    token began before the snapshot, so what `TAKE` reads about it is true. An owner that has ended does not come back,
    because neither the tokens of attempts nor the ids of instances are used again. An owner with a higher token keeps
    the key.

Guarantee: a key is marked only by the owner of its present token, together with all other keys of the block (`MARK`).
    In a run, `TAKE` and `MARK` lock the run's row, as `Run.guard` does, so the run cannot be taken over before the
    commit.

So the tokens of a key only grow, even if its row was pruned in between.

Lock order: run, instance, keys by their bytes. All statements use it, so two batches can wait for each other but cannot
deadlock.
"""

from app.fleet.db.namespace import Statement

DRAW_TOKEN = Statement("SELECT nextval('{schema}.once_tokens')")

# Whether the owner of the row `k` has not ended.
OWNER_IS_ALIVE = """
CASE
    WHEN k.run_id IS NULL
    THEN (SELECT i.state <> 'gone' FROM {schema}.instances AS i WHERE i.id = k.instance_id)
    ELSE (SELECT r.state = 'running' FROM {schema}.runs AS r WHERE r.id = k.run_id AND r.token = k.run_token)
END IS TRUE
"""

# The state of the row `k` for a block that asks for the key.
EFFECTIVE_STATE = f"""
CASE
    WHEN k.state = 'seen' AND k.expires_at > statement_timestamp() THEN 'seen'
    WHEN k.state = 'pending' AND {OWNER_IS_ALIVE} THEN 'pending'
    ELSE 'free'
END
"""

# One row if the caller may act: its instance is not gone, and its run, if any, has its token and keeps it until the
# commit.
OWNER = """
own_run AS MATERIALIZED (
    SELECT id
    FROM {schema}.runs
    WHERE id = %(run)s::int8 AND token = %(run_token)s::int8 AND state = 'running'
    FOR KEY SHARE
), owner AS MATERIALIZED (
    SELECT id
    FROM {schema}.instances
    WHERE id = %(instance)s AND state <> 'gone' AND (%(run)s::int8 IS NULL OR EXISTS (SELECT FROM own_run))
"""

# Keys that are not free are not locked. LATERAL reads row by row, by the primary key. The lock on the instance's row
# prevents that it is declared gone before the commit, as in a claim.
TAKE = Statement(f"""
WITH {OWNER}
    FOR KEY SHARE
), requested AS MATERIALIZED (
    SELECT w.key, coalesce(f.state, 'free') AS state
    FROM unnest(%(keys)s::text[]) AS w (key)
    LEFT JOIN LATERAL (
        SELECT {EFFECTIVE_STATE} AS state
        FROM {{schema}}.once_keys AS k
        WHERE k.scope = %(scope)s AND k.key = w.key
        LIMIT 1
    ) AS f ON true
), taken AS (
    INSERT INTO {{schema}}.once_keys AS k (scope, key, token, state, instance_id, run_id, run_token, taken_at)
    SELECT %(scope)s, a.key, %(token)s, 'pending', o.id, %(run)s, %(run_token)s, clock_timestamp()
    FROM owner AS o, requested AS a
    WHERE a.state = 'free'
    ORDER BY a.key COLLATE "C"
    ON CONFLICT (scope, key) DO UPDATE
    SET token = excluded.token, state = 'pending', instance_id = excluded.instance_id, run_id = excluded.run_id,
        run_token = excluded.run_token, taken_at = excluded.taken_at, expires_at = NULL
    WHERE k.token < excluded.token AND {EFFECTIVE_STATE} = 'free'
    RETURNING k.key
)
SELECT key, 'new' FROM taken
UNION ALL
SELECT a.key, a.state FROM owner, requested AS a WHERE a.state <> 'free'
UNION ALL
SELECT NULL, 'owner' FROM owner
""")

# The keys that the block still has. The planner expects few elements of `ARRAY (SELECT …)`, so it uses the primary key
# even while the table is small. `expires_at IS NULL` means pending. Written as `state = 'pending'`, it would make the
# planner use the index of pending keys, which has an entry for every key that was pending since the last vacuum.
OWN_KEYS = """
SELECT k.key
FROM {schema}.once_keys AS k
WHERE k.scope = %(scope)s AND k.key = ANY (ARRAY(SELECT unnest(%(keys)s::text[]))) AND k.token = %(token)s
  AND k.expires_at IS NULL
"""
LOCKED = """
ORDER BY k.key COLLATE "C"
FOR NO KEY UPDATE
"""

# All keys or none: without a session, this statement is the whole transaction.
MARK = Statement(f"""
WITH {OWNER}
), own AS MATERIALIZED (
    {OWN_KEYS} AND EXISTS (SELECT FROM owner) {LOCKED}
), marked AS (
    UPDATE {{schema}}.once_keys AS k
    SET state = 'seen', expires_at = clock_timestamp() + make_interval(secs => %(keep)s)
    WHERE k.scope = %(scope)s AND k.key = ANY (ARRAY(SELECT key FROM own))
      AND (SELECT count(*) FROM own) = cardinality(%(keys)s::text[])
    RETURNING 1
)
SELECT count(*) FROM marked
""")

RELEASE = Statement(f"""
WITH own AS MATERIALIZED (
    {OWN_KEYS} {LOCKED}
)
UPDATE {{schema}}.once_keys AS k
SET state = 'free', expires_at = clock_timestamp()
WHERE k.scope = %(scope)s AND k.key = ANY (ARRAY(SELECT key FROM own))
""")
