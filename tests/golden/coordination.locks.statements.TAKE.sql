WITH me AS MATERIALIZED (
    SELECT id FROM "flotilla".instances WHERE id = %(me)s AND state <> 'gone' FOR KEY SHARE
), existing AS MATERIALIZED (
    SELECT l.name
    FROM "flotilla".service_locks AS l
    WHERE l.name = %(name)s
), inserted AS (
    INSERT INTO "flotilla".service_locks (
        name, token, instance_id, instance, hostname, pid, holder, ttl, acquired_at, renewed_at, expires_at
    )
    SELECT %(name)s, 1, me.id, %(instance)s, %(hostname)s, %(pid)s::int, %(holder)s::text, %(ttl)s::interval,
           clock_timestamp(), clock_timestamp(), clock_timestamp() + %(ttl)s::interval
    FROM me
    WHERE NOT EXISTS (SELECT FROM existing)
    ON CONFLICT (name) DO NOTHING
    RETURNING token
), free AS MATERIALIZED (
    SELECT l.name
    FROM me, "flotilla".service_locks AS l
    WHERE l.name = %(name)s
      AND (
    l.instance_id IS NULL OR l.expires_at <= clock_timestamp()
    OR EXISTS (SELECT FROM "flotilla".instances AS g WHERE g.id = l.instance_id AND g.state = 'gone')
)
      AND NOT EXISTS (SELECT FROM "flotilla".lock_waiters AS w WHERE w.name = l.name)
    FOR UPDATE OF l SKIP LOCKED
), updated AS (
    UPDATE "flotilla".service_locks AS l
    SET token = l.token + 1, instance_id = %(me)s, instance = %(instance)s, hostname = %(hostname)s, pid = %(pid)s, holder = %(holder)s,
    ttl = %(ttl)s, waiter = NULL, acquired_at = clock_timestamp(), renewed_at = clock_timestamp(),
    expires_at = clock_timestamp() + %(ttl)s
    FROM free AS f
    WHERE l.name = f.name
    RETURNING l.token
)
SELECT token FROM inserted
UNION ALL
SELECT token FROM updated
