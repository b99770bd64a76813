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
), executable AS (
    SELECT unnest(s.action_ids) AS action_id
    FROM "flotilla".standby AS s
    JOIN "flotilla".instances AS i ON i.id = s.instance_id
    WHERE i.state IN ('starting', 'ready') AND i.role <> 'web'
)
SELECT a.name, min(q.run_at), EXISTS (
    SELECT FROM "flotilla".standby AS s
    JOIN "flotilla".instances AS i ON i.id = s.instance_id AND i.state <> 'gone' AND a.id = ANY (s.action_ids)
) AS known
FROM queues AS q
JOIN "flotilla".actions AS a ON a.id = q.action_id
WHERE a.paused_at IS NULL AND q.run_at < clock_timestamp() - %(after)s
  AND a.id NOT IN (SELECT action_id FROM executable)
GROUP BY a.id
ORDER BY a.name
LIMIT 100
