SELECT pg_terminate_backend(l.pid)
FROM "flotilla".instances AS i
JOIN pg_catalog.pg_locks AS l ON l.pid = i.turn_pid
WHERE i.id = %(id)s
  AND l.locktype = 'relation' AND l.relation = '"flotilla".leader_turn'::regclass
  AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
