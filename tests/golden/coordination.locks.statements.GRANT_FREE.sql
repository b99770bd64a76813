WITH available AS MATERIALIZED (
    SELECT l.name
    FROM "flotilla".service_locks AS l
    WHERE l.name = ANY (%(names)s::text[]) AND (
    l.instance_id IS NULL OR l.expires_at <= clock_timestamp()
    OR EXISTS (SELECT FROM "flotilla".instances AS g WHERE g.id = l.instance_id AND g.state = 'gone')
)
    ORDER BY l.name
    LIMIT ALL
    FOR UPDATE SKIP LOCKED
), next_waiter AS MATERIALIZED (
    SELECT a.name, n.id, n.instance_id, n.instance, n.hostname, n.pid, n.holder, n.ttl
    FROM available AS a
    LEFT JOIN LATERAL (
        SELECT w.id, w.instance_id, i.name AS instance, i.hostname, i.pid, w.holder, w.ttl
        FROM "flotilla".lock_waiters AS w
        JOIN "flotilla".instances AS i ON i.id = w.instance_id AND i.state <> 'gone'
        WHERE w.name = a.name
        ORDER BY w.id
        LIMIT 1
        FOR UPDATE OF w SKIP LOCKED
        FOR KEY SHARE OF i SKIP LOCKED
    ) AS n ON true
), granted AS (
    UPDATE "flotilla".service_locks AS l
    SET token = l.token + CASE WHEN n.id IS NULL THEN 0 ELSE 1 END,
        instance_id = n.instance_id, instance = n.instance, hostname = n.hostname, pid = n.pid, holder = n.holder,
        ttl = n.ttl, waiter = n.id, acquired_at = clock_timestamp(), renewed_at = clock_timestamp(),
        expires_at = clock_timestamp() + n.ttl
    FROM next_waiter AS n
    WHERE l.name = n.name
    RETURNING l.name, l.token, l.instance_id, l.waiter
), dequeued AS (
    DELETE FROM "flotilla".lock_waiters WHERE id IN (SELECT waiter FROM granted)
)
SELECT name, token, instance_id, waiter,
       CASE WHEN waiter IS NOT NULL
            THEN pg_notify('flotilla', format('granted:%%s:%%s:%%s', instance_id, waiter, token))::text
            ELSE NULL END
FROM granted
