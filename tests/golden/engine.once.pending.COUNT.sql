SELECT count(*)
FROM (SELECT FROM "flotilla".once_keys WHERE state = 'pending' ORDER BY taken_at LIMIT 1001) AS k
