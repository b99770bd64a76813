WITH RECURSIVE queues_by_priority AS (
    (
        SELECT action_id, priority, ordering_key, run_at
        FROM "flotilla".runs
        WHERE state = 'pending' AND ordering_key IS NULL
        ORDER BY action_id, priority, run_at
        LIMIT 1
    )
    UNION ALL
    SELECT n.*
    FROM queues_by_priority AS q, LATERAL (
        SELECT action_id, priority, ordering_key, run_at
        FROM "flotilla".runs
        WHERE state = 'pending' AND ordering_key IS NULL AND (action_id, priority) > (q.action_id, q.priority)
        ORDER BY action_id, priority, run_at
        LIMIT 1
    ) AS n
), queues_of_ordered AS (
    (
        SELECT action_id, priority, ordering_key, run_at
        FROM "flotilla".runs
        WHERE state = 'pending' AND ordering_key IS NOT NULL
        ORDER BY action_id, run_at
        LIMIT 1
    )
    UNION ALL
    SELECT n.*
    FROM queues_of_ordered AS q, LATERAL (
        SELECT action_id, priority, ordering_key, run_at
        FROM "flotilla".runs
        WHERE state = 'pending' AND ordering_key IS NOT NULL AND action_id > q.action_id
        ORDER BY action_id, run_at
        LIMIT 1
    ) AS n
), queues AS (
    SELECT * FROM queues_by_priority
    UNION ALL
    SELECT * FROM queues_of_ordered
)
SELECT 'queue' AS kind, action_id::int8 AS id, CASE WHEN ordering_key IS NULL THEN priority END::int8 AS number, run_at AS at, false AS flag
FROM queues
UNION ALL
SELECT 'mine', id, token, NULL, cancel_requested_at IS NOT NULL
FROM "flotilla".runs
WHERE state = 'running' AND action_id = ANY (%(actions)s::int[]) AND instance_id = %(me)s
UNION ALL
SELECT 'lapsed', count(*) FILTER (WHERE i.id IS NULL),
       count(*) FILTER (WHERE r.deadline_at < clock_timestamp() - make_interval(secs => %(slack)s)), NULL, false
FROM "flotilla".runs AS r
LEFT JOIN "flotilla".instances AS i ON i.id = r.instance_id AND i.state <> 'gone'
WHERE %(all_instances)s AND r.state = 'running'
UNION ALL
SELECT 'ready', count(*) FILTER (WHERE id < %(me)s), count(*), NULL,
       coalesce(bool_or(role <> 'web' AND version <> (SELECT version FROM "flotilla".instances WHERE id = %(me)s)),
                false)
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
JOIN "flotilla".instances AS i ON i.id = s.instance_id AND i.state = 'ready' AND i.role <> 'web'
WHERE s.action_ids = (SELECT action_ids FROM "flotilla".standby WHERE instance_id = %(me)s)
