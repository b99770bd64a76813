SELECT pg_advisory_xact_lock((SELECT oid::int4 FROM pg_catalog.pg_namespace WHERE nspname = 'flotilla'), 268435456 + id) FROM unnest(%(actions)s::int[]) AS w (id)
