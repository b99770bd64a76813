"""The statements of `registry.py`: joining, heartbeats, declaring gone, and the list of instances.

`{channel}` and `{class}` are the namespace's (`db/namespace.py`). A presence lock is the advisory lock of the namespace
with the key `Lock.PRESENCE.key(id)`, which is the instance's id.
"""

from app.fleet.db.namespace import Statement

NEXT_ID = Statement("SELECT nextval('{schema}.instance_ids')")
NEXT_NUMBER = Statement("SELECT nextval('{schema}.instance_numbers')")
TAKE_PRESENCE_LOCK = Statement("SELECT pg_try_advisory_lock({class}, %(key)s)")

INSERT_INSTANCE = Statement("""
INSERT INTO {schema}.instances (
    id, name, run_id, state, role, hostname, pid, port, version, workspace, workspace_shared, connections,
    concurrency, started_at, heartbeat_at, server_started_at
) VALUES (
    %(id)s, %(name)s, %(run_id)s, %(state)s, %(role)s, %(hostname)s, %(pid)s, %(port)s, %(version)s,
    %(workspace)s, %(workspace_shared)s, %(connections)s, %(concurrency)s, clock_timestamp(), clock_timestamp(),
    pg_postmaster_start_time()
)
""")

RELINK = Statement("""
UPDATE {schema}.instances
SET heartbeat_at = clock_timestamp(), server_started_at = pg_postmaster_start_time()
WHERE id = %(id)s AND run_id = %(run_id)s AND state <> 'gone'
""")

# Ends this instance's former link session, which still holds the presence lock after its network connection broke.
# The condition on the lock makes sure that the pid has not been reused by another session.
END_FORMER_SESSION = Statement("""
SELECT pg_terminate_backend(l.pid)
FROM pg_catalog.pg_locks AS l
WHERE l.locktype = 'advisory' AND l.granted AND l.pid = %(pid)s
  AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
  AND l.classid = '{channel}'::regnamespace AND l.objid = %(id)s::int::oid AND l.objsubid = 2
""")

HEARTBEAT = Statement("""
UPDATE {schema}.instances
SET heartbeat_at = clock_timestamp(), state = %(state)s, running = %(running)s, clock_ahead = %(ahead)s
WHERE id = %(id)s AND run_id = %(run_id)s AND state <> 'gone'
RETURNING drain_requested_at IS NOT NULL, drain_reason, clock_timestamp()
""")

REPORT_CONNECTION = Statement("""
UPDATE {schema}.instances
SET connection_out_seconds = %(seconds)s
WHERE id = %(id)s AND run_id = %(run_id)s AND state <> 'gone'
""")

# The steps of a shutdown that is under way. It never replaces the final record, which has more steps: not even if this
# statement waits for so long that the shutdown has ended without the link.
REPORT_SHUTDOWN = Statement("""
UPDATE {schema}.instances
SET shutdown = %(shutdown)s
WHERE id = %(id)s AND run_id = %(run_id)s AND state <> 'gone'
  AND jsonb_array_length(coalesce(shutdown, '[]')) <= jsonb_array_length(%(shutdown)s)
""")

LEAVE = Statement("""
UPDATE {schema}.instances
SET state = 'gone', gone_at = clock_timestamp(), gone_reason = %(reason)s, running = 0, shutdown = %(shutdown)s
WHERE id = %(id)s AND state <> 'gone'
""")

WRITE_SHUTDOWN = Statement("UPDATE {schema}.instances SET shutdown = %(shutdown)s WHERE id = %(id)s")

# Live rows whose presence lock is free. The lock is taken before the row is written, so the session has ended.
FIND_UNLINKED = Statement("""
SELECT i.id, i.server_started_at = pg_postmaster_start_time() AS same_server
FROM {schema}.instances AS i
WHERE i.state <> 'gone'
  AND NOT EXISTS (
      SELECT FROM pg_catalog.pg_locks AS l
      WHERE l.locktype = 'advisory' AND l.granted
        AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
        AND l.classid = '{channel}'::regnamespace AND l.objid = i.id::oid AND l.objsubid = 2
  )
""")

# A statement locks the tables that it reads until its transaction ends, and that of the leader lasts for its whole
# term: a migration that alters `instances` would wait for its end, and all heartbeats behind the migration. It is one
# message, because it is sent several times a second.
FIND_UNLINKED_IN_TERM = Statement(f"{FIND_UNLINKED};\nROLLBACK TO SAVEPOINT term\n")

TRY_PRESENCE_LOCK = Statement("SELECT pg_try_advisory_xact_lock({class}, %(key)s)")

# Locks the row before it is declared gone. A claim locks the row of its instance FOR KEY SHARE until it is committed:
# an instance that leaves waits for its own claims, and the leader skips the row while a claim is open.
LOCK_ROW = Statement("SELECT id FROM {schema}.instances WHERE id = %(id)s AND state <> 'gone' FOR UPDATE")
LOCK_ROW_UNLESS_LOCKED = Statement(f"{LOCK_ROW} SKIP LOCKED")

# Ends the sessions of the instance's pool whose transaction has locked a row of `instances`: SELECT … FOR KEY SHARE
# takes RowShareLock on the table and keeps it until the transaction ends.
END_POOL_SESSIONS = Statement("""
SELECT a.pid, pg_terminate_backend(a.pid)
FROM {schema}.instances AS i
JOIN pg_catalog.pg_stat_activity AS a
  ON a.application_name = %(pool)s || left(replace(i.run_id::text, '-', ''), %(digits)s)
 AND a.datname = current_database() AND a.usename = current_user
WHERE i.id = %(id)s AND i.state <> 'gone'
  AND EXISTS (
      SELECT FROM pg_catalog.pg_locks AS l
      WHERE l.pid = a.pid AND l.locktype = 'relation' AND l.granted AND l.mode = 'RowShareLock'
        AND l.relation = '{schema}.instances'::regclass
        AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
  )
""")

DECLARE_GONE = Statement("""
UPDATE {schema}.instances
SET state = 'gone', gone_at = clock_timestamp(), gone_reason = %(reason)s, running = 0
WHERE id = %(id)s AND state <> 'gone'
RETURNING id, name
""")

# Ends the instance's session in the leader queue. A frozen instance would otherwise be granted the lock and not lead.
END_QUEUE_SESSION = Statement("""
SELECT pg_terminate_backend(l.pid)
FROM {schema}.instances AS i
JOIN pg_catalog.pg_locks AS l ON l.pid = i.turn_pid
WHERE i.id = %(id)s
  AND l.locktype = 'relation' AND l.relation = '{schema}.leader_turn'::regclass
  AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
""")

NOTIFY = Statement("SELECT pg_notify('{channel}', %(payload)s)")

# The leader is the instance whose session holds the lock on `leader_turn`: at most one, and never out of date.
LIST = Statement("""
SELECT i.id, i.name, i.run_id, i.state, i.role, i.hostname, i.pid, i.port, i.version, i.workspace, i.connections,
       i.concurrency, i.running, i.started_at, i.gone_at, i.gone_reason, i.shutdown, i.server_started_at,
       (extract(epoch FROM clock_timestamp() - i.heartbeat_at) * 1000)::int8 AS heartbeat_age_ms,
       i.heartbeat_at, i.clock_ahead, i.connection_out_seconds,
       i.state <> 'gone' AND EXISTS (
           SELECT FROM pg_catalog.pg_locks AS l
           WHERE l.locktype = 'relation' AND l.granted AND l.mode = 'ExclusiveLock' AND l.pid = i.turn_pid
             AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
             AND l.relation = to_regclass('{schema}.leader_turn')
       ) AS leader
FROM {schema}.instances AS i
WHERE i.state <> 'gone' OR i.gone_at > clock_timestamp() - interval '10 minutes'
ORDER BY i.id
""")

FIND_NAME = Statement("SELECT id FROM {schema}.instances WHERE name = %(value)s AND state <> 'gone'")
FIND_WORKSPACE = Statement("SELECT id FROM {schema}.instances WHERE workspace = %(value)s AND state <> 'gone'")
FIND_OWNER = Statement("""
SELECT name, hostname, pid, started_at FROM {schema}.instances WHERE id = %(id)s
""")

FIND_STATE = Statement("SELECT state FROM {schema}.instances WHERE id = %(id)s")

REQUEST_DRAIN = Statement("""
UPDATE {schema}.instances
SET drain_requested_at = coalesce(drain_requested_at, clock_timestamp()), drain_reason = %(reason)s
WHERE name = %(name)s AND state <> 'gone'
RETURNING id
""")

INSERT_TERM = Statement("INSERT INTO {schema}.leader_terms (instance_id, instance) VALUES (%(id)s, %(name)s)")

PRUNE_TERMS = Statement("DELETE FROM {schema}.leader_terms WHERE began_at < clock_timestamp() - interval '7 days'")

# Gone instances are in `LIST` for ten minutes and in the table for a week. The batch is small, to keep locks short.
PRUNE_INSTANCES = Statement("""
DELETE FROM {schema}.instances
WHERE id IN (
    SELECT id FROM {schema}.instances
    WHERE state = 'gone' AND gone_at < clock_timestamp() - interval '7 days'
    ORDER BY id
    LIMIT 500
    FOR UPDATE SKIP LOCKED
)
""")
