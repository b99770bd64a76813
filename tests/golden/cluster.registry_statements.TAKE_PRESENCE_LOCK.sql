SELECT pg_try_advisory_lock((SELECT oid::int4 FROM pg_catalog.pg_namespace WHERE nspname = 'flotilla'), %(key)s)
