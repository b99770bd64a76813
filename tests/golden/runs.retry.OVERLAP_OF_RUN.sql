SELECT a.id, a.name, a.overlap
FROM "flotilla".finished_runs AS f
JOIN "flotilla".actions AS a ON a.id = f.action_id
WHERE f.id = %(id)s
