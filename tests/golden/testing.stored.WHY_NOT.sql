SELECT extract(epoch FROM r.run_at - clock_timestamp())::float8, a.paused_at IS NOT NULL,
       (SELECT min(e.id) FROM "flotilla".runs AS e
        WHERE e.action_id = r.action_id AND e.ordering_key = r.ordering_key AND e.id < r.id)
FROM "flotilla".runs AS r
JOIN "flotilla".actions AS a ON a.id = r.action_id
WHERE r.id = %(id)s
