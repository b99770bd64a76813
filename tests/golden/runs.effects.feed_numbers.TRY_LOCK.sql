SELECT pg_try_advisory_xact_lock((SELECT oid::int4 FROM pg_catalog.pg_namespace WHERE nspname = 'flotilla'), 536870912),
       (SELECT kept > '0' FROM "flotilla".feed_settings),
       set_config('idle_in_transaction_session_timeout', '5000', true),
       set_config('enable_bitmapscan', 'off', true)
