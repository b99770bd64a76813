WITH own AS MATERIALIZED (
    
SELECT k.key
FROM "flotilla".once_keys AS k
WHERE k.scope = %(scope)s AND k.key = ANY (ARRAY(SELECT unnest(%(keys)s::text[]))) AND k.token = %(token)s
  AND k.expires_at IS NULL
 
ORDER BY k.key COLLATE "C"
FOR NO KEY UPDATE

)
UPDATE "flotilla".once_keys AS k
SET state = 'free', expires_at = clock_timestamp()
WHERE k.scope = %(scope)s AND k.key = ANY (ARRAY(SELECT key FROM own))
