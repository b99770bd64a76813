WITH closed AS MATERIALIZED (
    SELECT name, failed_at
    FROM "flotilla".breakers
    WHERE name = %(name)s AND open_until IS NULL
    FOR UPDATE
), counted AS MATERIALIZED (
    SELECT c.name,
           clock_timestamp() || ARRAY(
               SELECT at
               FROM unnest(c.failed_at) AS at
               WHERE at > clock_timestamp() - make_interval(secs => %(within)s::float8)
               ORDER BY at DESC
           ) AS failed_at
    FROM closed AS c
), opened AS MATERIALIZED (
    SELECT name, failed_at, cardinality(failed_at) >= %(failures)s AS enough FROM counted
), written AS (
    UPDATE "flotilla".breakers AS b
    SET failed_at = CASE WHEN o.enough THEN '{}' ELSE o.failed_at END,
        open_until = CASE WHEN o.enough THEN clock_timestamp() + make_interval(secs => %(rest)s::float8) END,
        openings = CASE WHEN o.enough THEN 1 ELSE 0 END,
        token = b.token + CASE WHEN o.enough THEN 1 ELSE 0 END
    FROM opened AS o
    WHERE b.name = o.name
    RETURNING b.name, cardinality(b.failed_at) < 2 AS news, extract(epoch FROM b.open_until - clock_timestamp())::float8 AS rests,
    extract(epoch FROM (SELECT max(at) FROM unnest(b.failed_at) AS at) - clock_timestamp())::float8
    + %(within)s::float8 AS counts
)
SELECT rests, counts, CASE WHEN news THEN pg_notify('flotilla', 'breaker:' || name) END FROM written
