SELECT pg_terminate_backend(l.pid)
FROM pg_catalog.pg_locks AS l
WHERE l.locktype = 'advisory' AND l.granted AND l.pid = %(pid)s
  AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
  AND l.classid = 'flotilla'::regnamespace AND l.objid = %(id)s::int::oid AND l.objsubid = 2
