UPDATE "flotilla".actions AS a
SET rate_used_until = greatest(a.rate_used_until, statement_timestamp())
                      + make_interval(secs => u.started * a.rate_interval)
FROM unnest(%(actions)s::int[], %(started)s::int[]) AS u (action_id, started)
WHERE a.id = u.action_id AND a.rate_interval IS NOT NULL
