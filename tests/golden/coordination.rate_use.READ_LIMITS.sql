SELECT name, rate_interval, rate_burst, extract(epoch FROM used_until - clock_timestamp())::float8 AS ahead
FROM "flotilla".limits
ORDER BY name
LIMIT %(limit)s
