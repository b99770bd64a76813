SELECT schedule, next_run_at, clock_timestamp()
FROM "flotilla".actions
WHERE id = %(id)s AND paused_at IS NOT NULL
FOR NO KEY UPDATE
