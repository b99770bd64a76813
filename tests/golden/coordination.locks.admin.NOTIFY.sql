SELECT pg_notify('flotilla', format('released:%%s:%%s:%%s', %(instance_id)s::int, %(token)s::int8, %(name)s::text))
