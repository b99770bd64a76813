SELECT name
FROM "flotilla".service_locks
WHERE name = %(name)s AND token = %(token)s AND instance_id = %(me)s
FOR KEY SHARE
