WITH 
own_run AS MATERIALIZED (
    SELECT id
    FROM "flotilla".runs
    WHERE id = %(run)s::int8 AND token = %(run_token)s::int8 AND state = 'running'
    FOR KEY SHARE
), owner AS MATERIALIZED (
    SELECT id
    FROM "flotilla".instances
    WHERE id = %(instance)s AND state <> 'gone' AND (%(run)s::int8 IS NULL OR EXISTS (SELECT FROM own_run))

    FOR KEY SHARE
), requested AS MATERIALIZED (
    SELECT w.key, coalesce(f.state, 'free') AS state
    FROM unnest(%(keys)s::text[]) AS w (key)
    LEFT JOIN LATERAL (
        SELECT 
CASE
    WHEN k.state = 'seen' AND k.expires_at > statement_timestamp() THEN 'seen'
    WHEN k.state = 'pending' AND 
CASE
    WHEN k.run_id IS NULL
    THEN (SELECT i.state <> 'gone' FROM "flotilla".instances AS i WHERE i.id = k.instance_id)
    ELSE (SELECT r.state = 'running' FROM "flotilla".runs AS r WHERE r.id = k.run_id AND r.token = k.run_token)
END IS TRUE
 THEN 'pending'
    ELSE 'free'
END
 AS state
        FROM "flotilla".once_keys AS k
        WHERE k.scope = %(scope)s AND k.key = w.key
        LIMIT 1
    ) AS f ON true
), taken AS (
    INSERT INTO "flotilla".once_keys AS k (scope, key, token, state, instance_id, run_id, run_token, taken_at)
    SELECT %(scope)s, a.key, %(token)s, 'pending', o.id, %(run)s, %(run_token)s, clock_timestamp()
    FROM owner AS o, requested AS a
    WHERE a.state = 'free'
    ORDER BY a.key COLLATE "C"
    ON CONFLICT (scope, key) DO UPDATE
    SET token = excluded.token, state = 'pending', instance_id = excluded.instance_id, run_id = excluded.run_id,
        run_token = excluded.run_token, taken_at = excluded.taken_at, expires_at = NULL
    WHERE k.token < excluded.token AND 
CASE
    WHEN k.state = 'seen' AND k.expires_at > statement_timestamp() THEN 'seen'
    WHEN k.state = 'pending' AND 
CASE
    WHEN k.run_id IS NULL
    THEN (SELECT i.state <> 'gone' FROM "flotilla".instances AS i WHERE i.id = k.instance_id)
    ELSE (SELECT r.state = 'running' FROM "flotilla".runs AS r WHERE r.id = k.run_id AND r.token = k.run_token)
END IS TRUE
 THEN 'pending'
    ELSE 'free'
END
 = 'free'
    RETURNING k.key
)
SELECT key, 'new' FROM taken
UNION ALL
SELECT a.key, a.state FROM owner, requested AS a WHERE a.state <> 'free'
UNION ALL
SELECT NULL, 'owner' FROM owner
