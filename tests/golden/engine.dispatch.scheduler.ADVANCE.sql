UPDATE "flotilla".actions AS a
SET next_run_at = n.next
FROM unnest(%(actions)s::int[], %(were)s::timestamptz[], %(nexts)s::timestamptz[]) AS n (action_id, was, next)
WHERE a.id = n.action_id AND a.next_run_at = n.was
