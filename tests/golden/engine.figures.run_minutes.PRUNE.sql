WITH old AS MATERIALIZED (
    SELECT ctid
    FROM "flotilla".run_minutes
    WHERE minute < statement_timestamp() - %(kept)s
    ORDER BY minute, action_id
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
)
DELETE FROM "flotilla".run_minutes WHERE ctid = ANY (ARRAY(SELECT ctid FROM old))
