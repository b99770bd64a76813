WITH updated AS (
    UPDATE "flotilla".breakers AS b
    SET probe_instance = NULL, probe_until = NULL
    WHERE b.name = %(name)s AND b.token = %(token)s AND b.probe_instance IS NOT NULL
    RETURNING b.name, extract(epoch FROM b.open_until - clock_timestamp())::float8 AS open_seconds,
    extract(epoch FROM (SELECT max(at) FROM unnest(b.failed_at) AS at) - clock_timestamp())::float8
    + %(within)s::float8 AS failure_seconds
)
SELECT open_seconds, failure_seconds, pg_notify('flotilla', 'breaker:' || name) FROM updated
