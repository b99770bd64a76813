WITH opened AS (
    UPDATE "flotilla".breakers AS b
    SET open_until = clock_timestamp() + make_interval(secs => least(
            %(rest)s::float8 * 2 ^ least(b.openings, 30), greatest(%(rest)s::float8, %(rest_most)s::float8)
        )),
        openings = b.openings + 1, token = b.token + 1, probe_instance = NULL, probe_until = NULL
    WHERE b.name = %(name)s AND b.token = %(token)s AND b.probe_instance IS NOT NULL
    RETURNING b.name, extract(epoch FROM b.open_until - clock_timestamp())::float8 AS rests,
    extract(epoch FROM (SELECT max(at) FROM unnest(b.failed_at) AS at) - clock_timestamp())::float8
    + %(within)s::float8 AS counts
)
SELECT rests, counts, pg_notify('flotilla', 'breaker:' || name) FROM opened
