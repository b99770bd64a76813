WITH ours AS MATERIALIZED (
    SELECT l.name, l.token
    FROM unnest(%(names)s::text[], %(tokens)s::int8[]) AS h (name, token)
    JOIN "flotilla".service_locks AS l ON l.name = h.name AND l.token = h.token
    WHERE l.instance_id = %(me)s
), free AS MATERIALIZED (
    SELECT l.name
    FROM ours AS o
    JOIN "flotilla".service_locks AS l ON l.name = o.name AND l.token = o.token
    WHERE l.instance_id = %(me)s
    ORDER BY l.name
    FOR NO KEY UPDATE OF l SKIP LOCKED
), renewed AS (
    UPDATE "flotilla".service_locks AS l
    SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + l.ttl
    FROM free AS f
    WHERE l.name = f.name
    RETURNING l.name
)
SELECT o.name, o.token, r.name IS NOT NULL
FROM ours AS o
LEFT JOIN renewed AS r ON r.name = o.name
