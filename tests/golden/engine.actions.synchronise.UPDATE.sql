WITH changed AS MATERIALIZED (
    SELECT a.id, d.*
    FROM "flotilla".actions AS a
    JOIN jsonb_to_recordset(%(declared)s::jsonb) AS d (
    name text, schedule text, misfire text, overlap text, priority int, max_attempts int, retention float8,
    concurrency int, rate_interval float8, rate_burst int, next_run_at timestamptz, anchored bool, retry_delay float8,
    max_retry_delay float8
) ON d.name = a.name
    WHERE (a.schedule, a.misfire, a.overlap, a.priority, a.max_attempts, a.retention, a.concurrency, a.rate_interval,
           a.rate_burst, a.retry_delay, a.max_retry_delay)
          IS DISTINCT FROM
          (d.schedule, d.misfire, d.overlap, d.priority, d.max_attempts, make_interval(secs => d.retention),
           d.concurrency, d.rate_interval, d.rate_burst, d.retry_delay, d.max_retry_delay)
    ORDER BY a.id
    FOR NO KEY UPDATE OF a
)
UPDATE "flotilla".actions AS a
SET schedule = d.schedule,
    misfire = d.misfire,
    overlap = d.overlap,
    priority = d.priority,
    max_attempts = d.max_attempts,
    retention = make_interval(secs => d.retention),
    concurrency = d.concurrency,
    rate_interval = d.rate_interval,
    rate_burst = d.rate_burst,
    retry_delay = d.retry_delay,
    max_retry_delay = d.max_retry_delay,
    rate_used_until = CASE
        WHEN (a.rate_interval, a.rate_burst) IS NOT DISTINCT FROM (d.rate_interval, d.rate_burst)
        THEN a.rate_used_until
        WHEN a.rate_interval IS NULL OR a.rate_used_until IS NULL THEN NULL
        ELSE clock_timestamp() + make_interval(secs => greatest(0, least(
            d.rate_burst * d.rate_interval + 0.05,
            extract(epoch FROM a.rate_used_until - clock_timestamp())::float8 / a.rate_interval * d.rate_interval
        )))
    END,
    next_run_at = CASE
        WHEN a.schedule IS NOT DISTINCT FROM d.schedule THEN a.next_run_at
        WHEN d.anchored THEN least(a.next_run_at, d.next_run_at)
        ELSE d.next_run_at
    END
FROM changed AS d
WHERE a.id = d.id
