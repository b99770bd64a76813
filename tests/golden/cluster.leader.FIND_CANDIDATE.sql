SELECT EXISTS (
    SELECT FROM "flotilla".instances AS i
    JOIN pg_catalog.pg_locks AS l ON l.pid = i.turn_pid
    WHERE i.state <> 'gone' AND i.role <> 'web'
      AND l.locktype = 'relation' AND l.mode = 'ExclusiveLock'
      AND l.relation = '"flotilla".leader_turn'::regclass
      AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
)
