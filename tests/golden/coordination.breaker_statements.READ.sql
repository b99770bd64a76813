SELECT extract(epoch FROM b.open_until - clock_timestamp())::float8 AS open_seconds,
    extract(epoch FROM (SELECT max(at) FROM unnest(b.failed_at) AS at) - clock_timestamp())::float8
    + %(within)s::float8 AS failure_seconds FROM "flotilla".breakers AS b WHERE b.name = %(name)s
