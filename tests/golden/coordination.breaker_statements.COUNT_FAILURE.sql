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
), decided AS MATERIALIZED (
    SELECT name, failed_at, cardinality(failed_at) >= %(failures)s AS opens FROM counted
), updated AS (
    UPDATE "flotilla".breakers AS b
    SET failed_at = CASE WHEN d.opens THEN '{}' ELSE d.failed_at END,
        open_until = CASE WHEN d.opens THEN clock_timestamp() + make_interval(secs => %(rest)s::float8) END,
        openings = CASE WHEN d.opens THEN 1 ELSE 0 END,
        token = b.token + CASE WHEN d.opens THEN 1 ELSE 0 END
    FROM decided AS d
    WHERE b.name = d.name
    RETURNING b.name, cardinality(b.failed_at) < 2 AS notifies, extract(epoch FROM b.open_until - clock_timestamp())::float8 AS open_seconds,
    extract(epoch FROM (SELECT max(at) FROM unnest(b.failed_at) AS at) - clock_timestamp())::float8
    + %(within)s::float8 AS failure_seconds
)
SELECT open_seconds, failure_seconds, CASE WHEN notifies THEN pg_notify('flotilla', 'breaker:' || name) END FROM updated
