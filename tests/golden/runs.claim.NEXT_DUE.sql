SELECT p.action_id, p.priority, f.run_at
FROM unnest(%(actions)s::int[], %(priorities)s::int[]) AS p (action_id, priority), LATERAL (
    SELECT run_at
    FROM "flotilla".runs
    WHERE state = 'pending' AND ordering_key IS NULL AND action_id = p.action_id AND priority = p.priority
      AND run_at >= %(claimed_at)s
    ORDER BY run_at
    LIMIT 1
) AS f
