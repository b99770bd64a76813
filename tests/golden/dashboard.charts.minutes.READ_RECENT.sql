WITH periods AS MATERIALIZED (
    SELECT action_id, date_bin(%(width)s, minute, %(since)s) AS at,
           sum(succeeded) AS succeeded, sum(failed) AS failed, sum(cancelled) AS cancelled, sum(retried) AS retried,
           sum(paused) AS paused, sum(begun) AS begun, sum(waited_seconds) AS waited,
           max(longest_wait_seconds) AS longest_wait
    FROM "flotilla".run_minutes
    WHERE minute >= %(since)s AND action_id > 0
    GROUP BY action_id, at
)
SELECT a.name,
       sum(succeeded)::int8, sum(failed)::int8, sum(cancelled)::int8, sum(retried)::int8, sum(paused)::int8,
       sum(begun)::int8, sum(waited), max(longest_wait),
       array_agg((extract(epoch FROM at - %(since)s) / extract(epoch FROM %(width)s))::int),
       array_agg((succeeded + failed + cancelled + retried + paused)::int8), array_agg(failed::int8)
FROM periods AS p
JOIN "flotilla".actions AS a ON a.id = p.action_id
GROUP BY a.name
HAVING sum(succeeded + failed + cancelled + retried + paused + begun) > 0
