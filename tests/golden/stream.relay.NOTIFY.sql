SELECT pg_notify('flotilla', what) FROM unnest(%(what)s::text[]) AS what
