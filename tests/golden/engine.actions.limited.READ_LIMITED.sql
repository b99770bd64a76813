SELECT a.name, a.concurrency, a.rate_interval, a.rate_burst,
       extract(epoch FROM a.rate_used_until - clock_timestamp())::float8 AS ahead,
       CASE WHEN a.concurrency IS NOT NULL THEN (
           SELECT count(*) FROM "flotilla".runs AS r WHERE r.action_id = a.id AND r.state = 'running'
       ) END AS running
FROM "flotilla".actions AS a
WHERE a.concurrency IS NOT NULL OR a.rate_interval IS NOT NULL
ORDER BY a.name
LIMIT %(limit)s
