WITH running AS (
    SELECT r.action_id, max(r.id) AS newest, array_agg(DISTINCT r.instance ORDER BY r.instance) AS instances
    FROM "flotilla".runs AS r
    WHERE r.state = 'running'
    GROUP BY r.action_id
), living AS (
    SELECT u.action_id, array_agg(i.name ORDER BY i.name) FILTER (WHERE i.role <> 'web') AS instances
    FROM "flotilla".standby AS s
    JOIN "flotilla".instances AS i ON i.id = s.instance_id AND i.state <> 'gone', unnest(s.action_ids) AS u (action_id)
    GROUP BY u.action_id
)
SELECT a.name, a.schedule, a.next_run_at, a.paused_at IS NOT NULL AS paused, a.overlap, a.misfire, a.priority,
       a.max_attempts, a.concurrency, a.rate_interval, a.rate_burst,
       extract(epoch FROM a.retention)::float8 AS retention,
       coalesce(r.instances, ARRAY[]::text[]) AS running_on, coalesce(l.instances, ARRAY[]::text[]) AS standby,
       l.action_id IS NOT NULL AS known,
       greatest(r.newest, w.last, e.newest) AS last_run
FROM "flotilla".actions AS a
LEFT JOIN running AS r ON r.action_id = a.id
LEFT JOIN living AS l ON l.action_id = a.id
LEFT JOIN LATERAL (
    SELECT max(last.id) AS newest
    FROM (VALUES ('succeeded'), ('failed'), ('cancelled')) AS s (state), LATERAL (
        SELECT f.action_id, f.state, f.id
        FROM "flotilla".finished_runs AS f
        WHERE (f.action_id, f.state, f.id) <= (a.id, s.state, 9223372036854775807)
        ORDER BY f.action_id DESC, f.state DESC, f.id DESC
        LIMIT 1
    ) AS last
    WHERE last.action_id = a.id AND last.state = s.state
) AS e ON true
LEFT JOIN LATERAL (
    SELECT q.id AS last
    FROM "flotilla".runs AS q
    WHERE q.state = 'pending' AND (q.action_id, q.id) > (a.id, 0) AND (q.action_id, q.id) <= (a.id, 9223372036854775807)
    ORDER BY q.action_id DESC, q.id DESC
    LIMIT 1
) AS w ON true
WHERE %(name)s::text IS NULL OR a.name = %(name)s
ORDER BY a.name
