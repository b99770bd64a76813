SELECT 'USAGE on the schema'
WHERE NOT has_schema_privilege('flotilla', 'USAGE')
UNION ALL
SELECT p.privilege || ' on ' || c.relname
FROM pg_catalog.pg_class AS c
CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p (privilege)
WHERE c.relnamespace = 'flotilla'::regnamespace AND c.relname = ANY(%(tables)s)
  AND NOT has_table_privilege(c.oid, p.privilege)
UNION ALL
SELECT 'UPDATE on leader_turn'
FROM pg_catalog.pg_class AS c
WHERE c.relnamespace = 'flotilla'::regnamespace AND c.relname = 'leader_turn'
  AND NOT has_table_privilege(c.oid, 'UPDATE')
UNION ALL
SELECT 'USAGE on ' || c.relname
FROM pg_catalog.pg_class AS c
WHERE c.relnamespace = 'flotilla'::regnamespace AND c.relname = ANY(%(sequences)s)
  AND NOT has_sequence_privilege(c.oid, 'USAGE')
