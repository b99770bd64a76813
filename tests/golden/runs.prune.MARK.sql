UPDATE "flotilla".finished_runs
SET expires_at = 'epoch'
WHERE id = (
    SELECT id
    FROM "flotilla".finished_runs
    WHERE id = %(id)s AND expires_at < statement_timestamp()
    FOR UPDATE SKIP LOCKED
)
RETURNING id
