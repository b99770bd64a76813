SELECT b.name, extract(epoch FROM b.open_until - clock_timestamp())::float8 AS open_seconds, b.openings,
       cardinality(b.failed_at) AS failures,
       extract(epoch FROM clock_timestamp() - (SELECT max(at) FROM unnest(b.failed_at) AS at))::float8
       AS failure_age,
       i.name AS probed_by,
       CASE WHEN i.name IS NOT NULL THEN extract(epoch FROM b.probe_until - clock_timestamp())::float8 END
       AS probe_seconds
FROM "flotilla".breakers AS b
LEFT JOIN "flotilla".instances AS i
       ON i.id = b.probe_instance AND i.state <> 'gone' AND b.probe_until > clock_timestamp()
ORDER BY b.open_until IS NULL, b.name
LIMIT %(limit)s
