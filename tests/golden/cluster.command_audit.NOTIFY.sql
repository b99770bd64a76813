SELECT pg_notify('flotilla', 'command:' || %(done)s)
