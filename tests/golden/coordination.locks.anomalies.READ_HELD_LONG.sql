SELECT name, instance, holder, acquired_at
FROM "flotilla".service_locks
WHERE instance_id IS NOT NULL AND acquired_at < clock_timestamp() - %(age)s AND NOT starts_with(name, %(reserved)s)
ORDER BY acquired_at
LIMIT 100
