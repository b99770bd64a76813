SELECT token, instance_id, instance, holder, acquired_at
FROM "flotilla".service_locks
WHERE name = %(name)s AND instance_id IS NOT NULL
FOR UPDATE
