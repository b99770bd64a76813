WITH k AS MATERIALIZED (
    SELECT scope, key, instance_id, run_id, run_token, taken_at
    FROM "flotilla".once_keys
    WHERE state = 'pending'
    ORDER BY taken_at
    LIMIT %(limit)s
)
SELECT k.scope, k.key, k.taken_at, k.run_id, i.name AS instance, 
CASE
    WHEN k.run_id IS NULL
    THEN (SELECT i.state <> 'gone' FROM "flotilla".instances AS i WHERE i.id = k.instance_id)
    ELSE (SELECT r.state = 'running' FROM "flotilla".runs AS r WHERE r.id = k.run_id AND r.token = k.run_token)
END IS TRUE
 AS alive
FROM k
LEFT JOIN "flotilla".instances AS i ON i.id = k.instance_id
ORDER BY k.taken_at
