SELECT action_id, CASE WHEN ordering_key IS NULL THEN priority END, min(run_at), clock_timestamp()
FROM "flotilla".runs
WHERE state = 'pending' AND (%(id)s::int8 IS NULL OR id = %(id)s)
GROUP BY 1, 2
