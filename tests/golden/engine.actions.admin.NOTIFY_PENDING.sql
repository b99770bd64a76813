WITH pending AS (
    SELECT a.id AS action_id, w.priority, w.run_at
    FROM "flotilla".actions AS a, LATERAL (
        
    WITH RECURSIVE priorities AS (
        (
            SELECT priority
            FROM "flotilla".runs
            WHERE state = 'pending' AND action_id = a.id
            ORDER BY priority
            LIMIT 1
        )
        UNION ALL
        SELECT n.priority
        FROM priorities AS p, LATERAL (
            SELECT priority
            FROM "flotilla".runs
            WHERE state = 'pending' AND action_id = a.id AND priority > p.priority
            ORDER BY priority
            LIMIT 1
        ) AS n
    )

        SELECT p.priority, q.run_at
        FROM priorities AS p, LATERAL (
            SELECT run_at
            FROM "flotilla".runs
            WHERE state = 'pending' AND action_id = a.id AND priority = p.priority
            ORDER BY run_at
            LIMIT 1
        ) AS q
    ) AS w
    WHERE a.id = %(id)s
)

    SELECT pg_notify('flotilla', 'runs:' || string_agg(queue, ','))
    FROM (
        SELECT format('%%s:%%s:%%s', action_id, priority, floor(extract(epoch FROM min(run_at)) * 1e6)::int8) AS queue,
               row_number() OVER () / 200 AS page
        FROM pending
        GROUP BY action_id, priority
    ) AS p
    GROUP BY page
