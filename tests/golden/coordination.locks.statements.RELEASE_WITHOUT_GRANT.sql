UPDATE "flotilla".service_locks AS l SET instance_id = NULL, waiter = NULL WHERE l.name = %(name)s AND l.token = %(token)s AND l.instance_id = %(me)s RETURNING l.name
