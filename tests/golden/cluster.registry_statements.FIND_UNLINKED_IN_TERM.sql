SELECT i.id, i.server_started_at = pg_postmaster_start_time() AS same_server
FROM "flotilla".instances AS i
WHERE i.state <> 'gone'
  AND NOT EXISTS (
      SELECT FROM pg_catalog.pg_locks AS l
      WHERE l.locktype = 'advisory' AND l.granted
        AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
        AND l.classid = 'flotilla'::regnamespace AND l.objid = i.id::oid AND l.objsubid = 2
  )
;
ROLLBACK TO SAVEPOINT term
