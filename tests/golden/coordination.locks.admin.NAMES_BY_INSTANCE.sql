SELECT l.instance_id, array_agg(l.name ORDER BY l.name) AS names
FROM "flotilla".service_locks AS l
WHERE l.instance_id IS NOT NULL
GROUP BY l.instance_id
