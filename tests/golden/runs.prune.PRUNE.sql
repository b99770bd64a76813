WITH old AS MATERIALIZED (
    SELECT id
    FROM "flotilla".finished_runs
    WHERE id = ANY (%(ids)s::int8[]) AND expires_at < statement_timestamp()
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM "flotilla".finished_runs WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
), events AS (
    DELETE FROM "flotilla".run_events WHERE run_id = ANY (ARRAY(SELECT id FROM old))
), tracebacks AS (
    DELETE FROM "flotilla".run_tracebacks WHERE run_id = ANY (ARRAY(SELECT id FROM old))
), keys AS (
    DELETE FROM "flotilla".run_keys WHERE run_id = ANY (ARRAY(SELECT id FROM old))
)
SELECT id FROM removed
