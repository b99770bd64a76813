SELECT k.scope, count(*), min(k.taken_at)
FROM "flotilla".once_keys AS k
WHERE k.state = 'pending' AND k.taken_at < statement_timestamp() - interval '1 hour' AND 
CASE
    WHEN k.run_id IS NULL
    THEN (SELECT i.state <> 'gone' FROM "flotilla".instances AS i WHERE i.id = k.instance_id)
    ELSE (SELECT r.state = 'running' FROM "flotilla".runs AS r WHERE r.id = k.run_id AND r.token = k.run_token)
END IS TRUE

GROUP BY k.scope
ORDER BY k.scope
