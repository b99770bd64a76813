SELECT a.id,
       coalesce(least(
           CASE WHEN a.concurrency IS NOT NULL THEN a.concurrency - (
               SELECT count(*) FROM "flotilla".runs AS r WHERE r.action_id = a.id AND r.state = 'running'
           ) END,
           floor(
               a.rate_burst
               - extract(epoch FROM greatest(a.rate_used_until, statement_timestamp()) - statement_timestamp())
                 / a.rate_interval
               + 1e-6
           )
       )::int, 2147483647) AS allowed,
       extract(epoch FROM a.rate_used_until - statement_timestamp())::float8 - (a.rate_burst - 1) * a.rate_interval
FROM "flotilla".actions AS a
WHERE a.id = ANY (%(actions)s)
