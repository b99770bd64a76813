SELECT min(next_run_at), clock_timestamp()
FROM "flotilla".actions
WHERE id = ANY (%(actions)s::int[]) AND NOT (id = ANY (%(left)s::int[])) AND paused_at IS NULL
