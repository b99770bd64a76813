WITH old AS MATERIALIZED (
    SELECT ctid, expires_at
    FROM "flotilla".once_keys
    WHERE state <> 'pending' AND expires_at >= %(floor)s
      AND expires_at < statement_timestamp() - interval '1 minute'
    ORDER BY expires_at
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), abandoned AS MATERIALIZED (
    SELECT k.ctid
    FROM "flotilla".once_keys AS k
    WHERE k.state = 'pending' AND k.taken_at < statement_timestamp() - interval '1 day' AND NOT 
CASE
    WHEN k.run_id IS NULL
    THEN (SELECT i.state <> 'gone' FROM "flotilla".instances AS i WHERE i.id = k.instance_id)
    ELSE (SELECT r.state = 'running' FROM "flotilla".runs AS r WHERE r.id = k.run_id AND r.token = k.run_token)
END IS TRUE

    ORDER BY k.taken_at
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM "flotilla".once_keys
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM old UNION ALL SELECT ctid FROM abandoned))
    RETURNING 1
)
SELECT count(*), (SELECT max(expires_at) FROM old) FROM deleted
