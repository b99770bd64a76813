SELECT id, schedule, misfire, overlap, next_run_at, clock_timestamp()
FROM "flotilla".actions
WHERE id = ANY (%(actions)s::int[]) AND next_run_at <= clock_timestamp() AND paused_at IS NULL
 ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
