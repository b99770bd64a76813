SELECT date_bin(%(width)s, minute, %(since)s) AS at,
       sum(succeeded)::int8 AS succeeded, sum(failed)::int8 AS failed, sum(cancelled)::int8 AS cancelled,
       sum(retried)::int8 AS retried, sum(paused)::int8 AS paused, sum(work_seconds) AS work, sum(begun)::int8 AS begun,
       sum(waited_seconds) AS waited, max(longest_wait_seconds) AS longest_wait,
       coalesce(max(waiting) FILTER (WHERE action_id = %(action)s), max(0) FILTER (WHERE action_id = 0)) AS waiting,
       max(oldest_seconds) FILTER (WHERE action_id = %(action)s AND waiting > 0) AS oldest
FROM "flotilla".run_minutes
WHERE minute >= %(since)s AND (%(action)s = 0 OR action_id IN (0, %(action)s))
GROUP BY at
