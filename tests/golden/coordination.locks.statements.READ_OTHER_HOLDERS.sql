SELECT l.name, h.token, l.token, l.instance, extract(epoch FROM clock_timestamp() - l.acquired_at)::float8
FROM unnest(%(names)s::text[], %(tokens)s::int8[]) AS h (name, token)
JOIN "flotilla".service_locks AS l ON l.name = h.name
WHERE l.instance_id IS NOT NULL AND (l.token <> h.token OR l.instance_id <> %(me)s)
  AND NOT EXISTS (SELECT FROM "flotilla".lock_releases AS r WHERE r.name = h.name AND r.token = h.token)
