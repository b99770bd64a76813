SELECT pg_notify('flotilla', 'members:')
