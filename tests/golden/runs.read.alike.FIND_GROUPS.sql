WITH RECURSIVE groups AS (
    (
        SELECT f.action_id, f.alike, 1 AS number
        FROM "flotilla".finished_runs AS f
        WHERE f.alike IS NOT NULL AND f.action_id >= %(first_action)s
        ORDER BY f.action_id, f.alike
        LIMIT 1
    )
    UNION ALL
    SELECT n.action_id, n.alike, g.number + 1
    FROM groups AS g, LATERAL (
        SELECT f.action_id, f.alike
        FROM "flotilla".finished_runs AS f
        WHERE f.alike IS NOT NULL AND (f.action_id, f.alike) > (g.action_id, g.alike)
        ORDER BY f.action_id, f.alike
        LIMIT 1
    ) AS n
    WHERE g.number <= 100 AND n.action_id <= %(last_action)s
)
SELECT a.name AS action, g.alike, c.runs, newest.id AS newest, newest.finished_at AS newest_at,
       left(newest.error, 500) AS error, oldest.finished_at AS oldest_at
FROM groups AS g
JOIN "flotilla".actions AS a ON a.id = g.action_id
CROSS JOIN LATERAL (
    -- The next entries of the index, whichever group they are of: with an upper bound, the planner may read all runs of
    -- the action, because it assumes that the group has most of them.
    SELECT count(*) AS runs
    FROM (
        SELECT f.action_id, f.alike
        FROM "flotilla".finished_runs AS f
        WHERE f.alike IS NOT NULL AND (f.action_id, f.alike, f.id) > (g.action_id, g.alike, 0)
        ORDER BY f.action_id, f.alike, f.id
        LIMIT 1001
    ) AS f
    WHERE f.action_id = g.action_id AND f.alike = g.alike
) AS c
CROSS JOIN LATERAL (
    SELECT f.id, f.finished_at, f.error
    FROM "flotilla".finished_runs AS f
    WHERE f.alike IS NOT NULL AND (f.action_id, f.alike, f.id) > (g.action_id, g.alike, 0)
      AND (f.action_id, f.alike, f.id) <= (g.action_id, g.alike, 9223372036854775807)
    ORDER BY f.action_id DESC, f.alike DESC, f.id DESC
    LIMIT 1
) AS newest
CROSS JOIN LATERAL (
    SELECT f.finished_at
    FROM "flotilla".finished_runs AS f
    WHERE f.alike IS NOT NULL AND (f.action_id, f.alike, f.id) > (g.action_id, g.alike, 0)
      AND (f.action_id, f.alike, f.id) <= (g.action_id, g.alike, 9223372036854775807)
    ORDER BY f.action_id, f.alike, f.id
    LIMIT 1
) AS oldest
