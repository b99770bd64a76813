SELECT r.id
FROM (
    SELECT id, action_id FROM "flotilla".runs UNION ALL SELECT id, action_id FROM "flotilla".finished_runs
) AS r
JOIN "flotilla".actions AS a ON a.id = r.action_id
WHERE %(action)s::text IS NULL OR a.name = %(action)s
ORDER BY r.id
