SELECT pg_notify('flotilla', payload) FROM unnest(%(payloads)s::text[]) AS payload
