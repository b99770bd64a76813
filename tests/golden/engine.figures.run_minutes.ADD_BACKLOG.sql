WITH backlog AS MATERIALIZED (
    SELECT action_id, runs, oldest_seconds FROM "flotilla".runnable_runs WHERE runs > 0
)
INSERT INTO "flotilla".run_minutes AS m (minute, action_id, waiting, oldest_seconds)
SELECT date_trunc('minute', statement_timestamp()), b.*
FROM (
    SELECT 0 AS action_id, coalesce(sum(runs), 0), coalesce(max(oldest_seconds), 0) FROM backlog
    UNION ALL
    SELECT action_id, runs, oldest_seconds FROM backlog
) AS b
ORDER BY b.action_id
ON CONFLICT (minute, action_id) DO UPDATE
SET waiting = greatest(m.waiting, excluded.waiting),
    oldest_seconds = greatest(m.oldest_seconds, excluded.oldest_seconds)
