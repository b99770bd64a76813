WITH RECURSIVE place AS (
    (SELECT action_id, priority FROM "flotilla".runs WHERE state = 'pending' ORDER BY action_id, priority LIMIT 1)
    UNION ALL
    SELECT n.action_id, n.priority
    FROM place AS p, LATERAL (
        SELECT action_id, priority
        FROM "flotilla".runs
        WHERE state = 'pending' AND (action_id, priority) > (p.action_id, p.priority)
        ORDER BY action_id, priority
        LIMIT 1
    ) AS n
)
SELECT 'place' AS kind, p.action_id::int8 AS id, p.priority::int8 AS number, f.run_at AS at, false AS flag
FROM place AS p, LATERAL (
    SELECT run_at
    FROM "flotilla".runs
    WHERE state = 'pending' AND action_id = p.action_id AND priority = p.priority
    ORDER BY run_at
    LIMIT 1
) AS f
UNION ALL
SELECT 'mine', id, token, NULL, cancel_requested_at IS NOT NULL
FROM "flotilla".runs
WHERE state = 'running' AND action_id = ANY (%(actions)s::int[]) AND instance_id = %(me)s
UNION ALL
SELECT 'lapsed', count(*) FILTER (WHERE i.id IS NULL),
       count(*) FILTER (WHERE r.deadline_at < clock_timestamp() - make_interval(secs => %(slack)s)), NULL, false
FROM "flotilla".runs AS r
LEFT JOIN "flotilla".instances AS i ON i.id = r.instance_id AND i.state <> 'gone'
WHERE %(everyone)s AND r.state = 'running'
UNION ALL
SELECT 'ready', count(*) FILTER (WHERE id < %(me)s), count(*), NULL, false
FROM "flotilla".instances
WHERE state = 'ready'
UNION ALL
SELECT 'slot', a.id, 0, a.next_run_at, false
FROM (
    SELECT id, next_run_at
    FROM "flotilla".actions
    WHERE id = ANY (%(actions)s::int[]) AND paused_at IS NULL AND next_run_at IS NOT NULL
    ORDER BY next_run_at
    LIMIT 1
) AS a
UNION ALL
SELECT 'limit', id, 0, NULL, false
FROM "flotilla".actions
WHERE id = ANY (%(actions)s::int[]) AND (concurrency IS NOT NULL OR rate_interval IS NOT NULL)
UNION ALL
SELECT 'now', count(*) FILTER (WHERE i.id < %(me)s), count(*), clock_timestamp(),
       EXISTS (SELECT FROM "flotilla".standby WHERE instance_id = %(me)s)
FROM "flotilla".standby AS s
JOIN "flotilla".instances AS i ON i.id = s.instance_id AND i.state = 'ready'
WHERE s.action_ids = (SELECT action_ids FROM "flotilla".standby WHERE instance_id = %(me)s)
