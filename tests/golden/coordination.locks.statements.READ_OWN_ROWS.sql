SELECT name, token, waiter
FROM "flotilla".service_locks
WHERE instance_id = %(me)s
UNION ALL
SELECT name, NULL, id
FROM "flotilla".lock_waiters
WHERE instance_id = %(me)s
