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

), own AS MATERIALIZED (
    
SELECT k.key
FROM "flotilla".once_keys AS k
WHERE k.scope = %(scope)s AND k.key = ANY (ARRAY(SELECT unnest(%(keys)s::text[]))) AND k.token = %(token)s
  AND k.expires_at IS NULL
 AND EXISTS (SELECT FROM owner) 
ORDER BY k.key COLLATE "C"
FOR NO KEY UPDATE

), marked AS (
    UPDATE "flotilla".once_keys AS k
    SET state = 'seen', expires_at = clock_timestamp() + make_interval(secs => %(keep)s)
    WHERE k.scope = %(scope)s AND k.key = ANY (ARRAY(SELECT key FROM own))
      AND (SELECT count(*) FROM own) = cardinality(%(keys)s::text[])
    RETURNING 1
)
SELECT count(*) FROM marked
