SELECT a.pid, pg_terminate_backend(a.pid)
FROM "flotilla".instances AS i
JOIN pg_catalog.pg_stat_activity AS a
  ON a.application_name = %(pool)s || left(replace(i.run_id::text, '-', ''), %(digits)s)
 AND a.datname = current_database() AND a.usename = current_user
WHERE i.id = %(id)s AND i.state <> 'gone'
  AND EXISTS (
      SELECT FROM pg_catalog.pg_locks AS l
      WHERE l.pid = a.pid AND l.locktype = 'relation' AND l.granted AND l.mode = 'RowShareLock'
        AND l.relation = '"flotilla".instances'::regclass
        AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
  )
