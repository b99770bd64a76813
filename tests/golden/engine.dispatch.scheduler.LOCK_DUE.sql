WITH due AS MATERIALIZED (
    SELECT id
    FROM "flotilla".actions
    WHERE next_run_at <= clock_timestamp() AND paused_at IS NULL AND id = ANY (%(actions)s::int[])
    ORDER BY next_run_at, id
    LIMIT %(batch)s
)
SELECT id, pg_try_advisory_xact_lock((SELECT oid::int4 FROM pg_catalog.pg_namespace WHERE nspname = 'flotilla'), %(kind)s + id) FROM due
