SELECT instance, holder, acquired_at FROM "flotilla".service_locks WHERE name = %(name)s
