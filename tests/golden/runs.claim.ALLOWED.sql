SELECT a.id,
       greatest(0, least(
           2147483647,
           CASE WHEN a.concurrency IS NOT NULL THEN a.concurrency - (
               SELECT count(*) FROM "flotilla".runs AS r WHERE r.action_id = a.id AND r.state = 'running'
           ) END,
           floor(
               a.rate_burst + 1e-6
               + (0.05 - extract(epoch FROM greatest(a.rate_used_until, statement_timestamp())
                                                    - statement_timestamp())) / a.rate_interval
           )
       ))::int AS allowed,
       extract(epoch FROM a.rate_used_until - statement_timestamp())::float8
       - (a.rate_burst - 1) * a.rate_interval - 0.05 AS seconds
FROM "flotilla".actions AS a
WHERE a.id = ANY (%(actions)s)
