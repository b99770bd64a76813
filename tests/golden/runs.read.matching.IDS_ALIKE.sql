SELECT r.id
FROM "flotilla".finished_runs AS r
WHERE r.alike IS NOT NULL AND (r.action_id, r.alike, r.id) > (%(action_id)s, %(alike)s, %(after)s)
  AND (r.action_id, r.alike, r.id) < (%(action_id)s, %(alike)s, %(before)s)
ORDER BY r.action_id DESC, r.alike DESC, r.id DESC
LIMIT %(limit)s
