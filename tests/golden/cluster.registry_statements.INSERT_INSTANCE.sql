INSERT INTO "flotilla".instances (
    id, name, run_id, state, role, hostname, pid, port, version, workspace, workspace_shared, connections,
    concurrency, started_at, heartbeat_at, server_started_at
) VALUES (
    %(id)s, %(name)s, %(run_id)s, %(state)s, %(role)s, %(hostname)s, %(pid)s, %(port)s, %(version)s,
    %(workspace)s, %(workspace_shared)s, %(connections)s, %(concurrency)s, clock_timestamp(), clock_timestamp(),
    pg_postmaster_start_time()
)
