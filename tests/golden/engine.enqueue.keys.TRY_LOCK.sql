SELECT pg_try_advisory_xact_lock((SELECT oid::int4 FROM pg_catalog.pg_namespace WHERE nspname = 'flotilla'), hashtext(%(key)s) | -2147483648)
