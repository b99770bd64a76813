SELECT l.name, l.token, l.instance, l.instance_id, l.hostname, l.pid, l.holder, l.acquired_at, l.renewed_at,
       l.expires_at, (SELECT count(*) FROM "flotilla".lock_waiters AS w WHERE w.name = l.name) AS waiting
FROM "flotilla".service_locks AS l
WHERE l.instance_id IS NOT NULL AND (%(name)s::text IS NULL OR l.name = %(name)s)
ORDER BY l.name
LIMIT %(limit)s::int8
