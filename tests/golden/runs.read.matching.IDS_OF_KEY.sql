SELECT k.run_id
FROM "flotilla".actions AS a
JOIN "flotilla".run_keys AS k ON k.action_id = a.id AND k.key = 'key:' || %(key)s::text
WHERE (%(action_id)s::int IS NULL OR a.id = %(action_id)s) AND k.run_id < %(before)s AND k.run_id > %(after)s
ORDER BY k.run_id DESC
LIMIT %(limit)s
