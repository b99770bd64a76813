SELECT i.id, i.name, i.run_id, i.state, i.role, i.hostname, i.pid, i.port, i.version, i.workspace, i.connections,
       i.concurrency, i.running, i.started_at, i.gone_at, i.gone_reason, i.shutdown, i.server_started_at,
       (extract(epoch FROM clock_timestamp() - i.heartbeat_at) * 1000)::int8 AS heartbeat_age_ms,
       i.heartbeat_at, i.clock_ahead, i.connection_out_seconds,
       i.state <> 'gone' AND EXISTS (
           SELECT FROM pg_catalog.pg_locks AS l
           WHERE l.locktype = 'relation' AND l.granted AND l.mode = 'ExclusiveLock' AND l.pid = i.turn_pid
             AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
             AND l.relation = to_regclass('"flotilla".leader_turn')
       ) AS leader
FROM "flotilla".instances AS i
WHERE i.state <> 'gone' OR i.gone_at > clock_timestamp() - interval '10 minutes'
ORDER BY i.id
