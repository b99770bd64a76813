INSERT INTO "flotilla".actions (
    name, schedule, misfire, overlap, priority, max_attempts, retention, concurrency, rate_interval, rate_burst,
    next_run_at, retry_delay, max_retry_delay
)
SELECT d.name, d.schedule, d.misfire, d.overlap, d.priority, d.max_attempts, make_interval(secs => d.retention),
       d.concurrency, d.rate_interval, d.rate_burst, d.next_run_at, d.retry_delay, d.max_retry_delay
FROM jsonb_to_recordset(%(declared)s::jsonb) AS d (
    name text, schedule text, misfire text, overlap text, priority int, max_attempts int, retention float8,
    concurrency int, rate_interval float8, rate_burst int, next_run_at timestamptz, anchored bool, retry_delay float8,
    max_retry_delay float8
)
WHERE NOT EXISTS (SELECT FROM "flotilla".actions AS a WHERE a.name = d.name)
ORDER BY d.name
ON CONFLICT (name) DO NOTHING
