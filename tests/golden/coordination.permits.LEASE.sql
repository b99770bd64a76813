WITH existing AS MATERIALIZED (
    SELECT name, used_until
    FROM "flotilla".limits
    WHERE name = %(name)s
    FOR UPDATE
), inserted AS (
    INSERT INTO "flotilla".limits (name, used_until, rate_interval, rate_burst)
    SELECT %(name)s, clock_timestamp(), %(interval)s, %(burst)s
    WHERE NOT EXISTS (SELECT FROM existing)
    ON CONFLICT (name) DO NOTHING
), read AS MATERIALIZED (
    SELECT name, used_until, clock_timestamp() AS now
    FROM existing
), free AS MATERIALIZED (
    SELECT name, greatest(used_until, now) AS since,
           extract(epoch FROM greatest(used_until, now) - now)::float8 - %(burst_seconds)s::float8 AS first
    FROM read
), lease AS MATERIALIZED (
    SELECT name, since, first,
           greatest(0, least(
               %(waiters)s::float8,
               greatest(%(lease_size)s::float8, floor(-first / %(interval)s::float8) + 1),
               floor((%(max_wait)s::float8 - first) / %(interval)s::float8) + 1
           ))::int AS permits
    FROM free
), updated AS (
    UPDATE "flotilla".limits AS l
    SET used_until = u.since + make_interval(secs => u.permits * %(interval)s::float8),
        rate_interval = %(interval)s, rate_burst = %(burst)s
    FROM lease AS u
    WHERE l.name = u.name AND u.permits > 0
)
SELECT permits, first FROM lease
