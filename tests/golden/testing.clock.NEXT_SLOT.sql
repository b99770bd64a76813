SELECT name, next_run_at, next_run_at - clock_timestamp()
FROM "flotilla".actions
WHERE id = ANY (%(actions)s) AND paused_at IS NULL AND next_run_at IS NOT NULL
ORDER BY next_run_at, id
LIMIT 1
