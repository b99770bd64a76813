UPDATE "flotilla".service_locks
SET token = token + 1, instance_id = NULL, waiter = NULL
WHERE name = %(name)s
