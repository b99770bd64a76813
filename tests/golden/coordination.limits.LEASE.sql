WITH known AS MATERIALIZED (
    SELECT name, used_until
    FROM "flotilla".limits
    WHERE name = %(name)s
    FOR UPDATE
), made AS (
    INSERT INTO "flotilla".limits (name, used_until)
    SELECT %(name)s, clock_timestamp()
    WHERE NOT EXISTS (SELECT FROM known)
    ON CONFLICT (name) DO NOTHING
), read AS MATERIALIZED (
    SELECT name, used_until, clock_timestamp() AS now
    FROM known
), free AS MATERIALIZED (
    SELECT name, greatest(used_until, now) AS since,
           extract(epoch FROM greatest(used_until, now) - now)::float8 - %(burst)s::float8 AS first
    FROM read
), lease AS MATERIALIZED (
    SELECT name, since, first,
           greatest(0, least(
               %(wanted)s::float8,
               greatest(%(most)s::float8, floor(-first / %(interval)s::float8) + 1),
               floor((%(within)s::float8 - first) / %(interval)s::float8) + 1
           ))::int AS taken
    FROM free
), moved AS (
    UPDATE "flotilla".limits AS l
    SET used_until = u.since + make_interval(secs => u.taken * %(interval)s::float8)
    FROM lease AS u
    WHERE l.name = u.name AND u.taken > 0
)
SELECT taken, first FROM lease
