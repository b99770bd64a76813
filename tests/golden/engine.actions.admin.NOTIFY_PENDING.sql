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

    SELECT pg_notify('flotilla', 'runs:' || string_agg(queue, ','))
    FROM (
        SELECT format('%%s:%%s:%%s', action_id, queue_priority, floor(extract(epoch FROM min(run_at)) * 1e6)::int8)
                   AS queue,
               row_number() OVER () / 200 AS page
        FROM (SELECT action_id, run_at, CASE WHEN ordering_key IS NULL THEN priority END AS queue_priority FROM queues WHERE action_id = %(id)s) AS q
        GROUP BY action_id, queue_priority
    ) AS p
    GROUP BY page
