SELECT pg_notify('flotilla', %(payload)s)
