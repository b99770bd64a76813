SELECT r.id, a.name, r.instance, r.deadline_at
FROM "flotilla".runs AS r
JOIN "flotilla".actions AS a ON a.id = r.action_id
WHERE r.state = 'running' AND r.deadline_at < clock_timestamp() - make_interval(secs => %(slack)s)
ORDER BY r.deadline_at
LIMIT 100
