SELECT l.name FROM "flotilla".service_locks AS l WHERE l.name = %(name)s AND l.token = %(token)s AND l.instance_id IS NULL
