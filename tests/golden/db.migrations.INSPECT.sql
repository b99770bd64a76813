SELECT to_regclass('"flotilla".alembic_version') IS NOT NULL AS versioned,
       to_regclass('"flotilla".instances') IS NOT NULL AS has_instances,
       EXISTS (
           SELECT FROM pg_catalog.pg_class AS c
           JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
           WHERE n.nspname = 'flotilla'
       ) AS occupied
