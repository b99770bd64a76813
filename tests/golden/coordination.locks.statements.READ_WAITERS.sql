SELECT waiter, token
FROM "flotilla".service_locks
WHERE instance_id = %(me)s AND waiter = ANY (%(waiters)s::int8[])
UNION ALL
SELECT id, NULL
FROM "flotilla".lock_waiters
WHERE id = ANY (%(waiters)s::int8[])
