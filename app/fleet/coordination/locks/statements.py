"""Statements on `service_locks` and `lock_waiters`: take a lock, grant it to the next waiter, renew it, guard by it.

Each statement is a transaction of its own, except GUARD, an operator's release and the two `…_OF_DEAD`.
Its rows say what it changed. `lock.py` has the protocol.

    statement                        changes a row if                               increments the token
    TAKE                             the lock is free, and has no waiters           always
    RELEASE                          it is still held under that token              if a waiter is granted the lock
    GRANT_FREE                       it is free                                     if a waiter is granted the lock
    GRANT_LOCKS_OF_DEAD              its instance is gone                           if a waiter is granted the lock
    GRANT_RELEASED                   it was released under that token, and not      if a waiter is granted the lock
                                     granted since
    RELEASE_WITHOUT_GRANT            it is still held under that token              never
    RENEW                            it is still held under that token              never

A statement that increments the token first locks the row FOR UPDATE, and skips a row that is locked. The other two lock
it FOR NO KEY UPDATE; RENEW also skips a row that is locked. GUARD locks it FOR KEY SHARE, which conflicts with FOR
UPDATE and not with FOR NO KEY UPDATE.
"""

from app.fleet.cluster.registry import BATCH
from app.fleet.db.namespace import Statement

# Requires an explicit `gone` row: a new instance may not be visible yet.
FREE = """(
    l.instance_id IS NULL OR l.expires_at <= clock_timestamp()
    OR EXISTS (SELECT FROM {schema}.instances AS g WHERE g.id = l.instance_id AND g.state = 'gone')
)"""

# A transaction that declares this instance gone waits for this row lock, and then finds what the statement has taken
# (as in `runs/claim.py`).
ALIVE = "SELECT id FROM {schema}.instances WHERE id = %(me)s AND state <> 'gone' FOR KEY SHARE"

HOLDER = """instance_id = %(me)s, instance = %(instance)s, hostname = %(hostname)s, pid = %(pid)s, holder = %(holder)s,
    ttl = %(ttl)s, waiter = NULL, acquired_at = clock_timestamp(), renewed_at = clock_timestamp(),
    expires_at = clock_timestamp() + %(ttl)s"""

TAKE = Statement(f"""
WITH me AS MATERIALIZED (
    {ALIVE}
), existing AS MATERIALIZED (
    SELECT l.name
    FROM {{schema}}.service_locks AS l
    WHERE l.name = %(name)s
), inserted AS (
    INSERT INTO {{schema}}.service_locks (
        name, token, instance_id, instance, hostname, pid, holder, ttl, acquired_at, renewed_at, expires_at
    )
    SELECT %(name)s, 1, me.id, %(instance)s, %(hostname)s, %(pid)s::int, %(holder)s::text, %(ttl)s::interval,
           clock_timestamp(), clock_timestamp(), clock_timestamp() + %(ttl)s::interval
    FROM me
    WHERE NOT EXISTS (SELECT FROM existing)
    ON CONFLICT (name) DO NOTHING
    RETURNING token
), free AS MATERIALIZED (
    SELECT l.name
    FROM me, {{schema}}.service_locks AS l
    WHERE l.name = %(name)s
      AND {FREE}
      AND NOT EXISTS (SELECT FROM {{schema}}.lock_waiters AS w WHERE w.name = l.name)
    FOR UPDATE OF l SKIP LOCKED
), updated AS (
    UPDATE {{schema}}.service_locks AS l
    SET token = l.token + 1, {HOLDER}
    FROM free AS f
    WHERE l.name = f.name
    RETURNING l.token
)
SELECT token FROM inserted
UNION ALL
SELECT token FROM updated
""")

ENTER_QUEUE = Statement(f"""
WITH me AS MATERIALIZED (
    {ALIVE}
)
INSERT INTO {{schema}}.lock_waiters (name, instance_id, holder, ttl, held)
SELECT %(name)s, me.id, %(holder)s::text, %(ttl)s::interval, %(held)s::text[] FROM me
RETURNING id
""")


def grant_to_next(which: str, without_waiter: str = "NULL", limit: str = "ALL") -> str:
    """Return the statement that grants each of these locks to its longest waiter, or releases it if it has none.

    PostgreSQL evaluates the expression `without_waiter` for each lock that has no waiter.
    """
    return f"""
WITH available AS MATERIALIZED (
    SELECT l.name
    FROM {{schema}}.service_locks AS l
    WHERE {which}
    ORDER BY l.name
    LIMIT {limit}
    FOR UPDATE SKIP LOCKED
), next_waiter AS MATERIALIZED (
    SELECT a.name, n.id, n.instance_id, n.instance, n.hostname, n.pid, n.holder, n.ttl
    FROM available AS a
    LEFT JOIN LATERAL (
        SELECT w.id, w.instance_id, i.name AS instance, i.hostname, i.pid, w.holder, w.ttl
        FROM {{schema}}.lock_waiters AS w
        JOIN {{schema}}.instances AS i ON i.id = w.instance_id AND i.state <> 'gone'
        WHERE w.name = a.name
        ORDER BY w.id
        LIMIT 1
        FOR UPDATE OF w SKIP LOCKED
        FOR KEY SHARE OF i SKIP LOCKED
    ) AS n ON true
), granted AS (
    UPDATE {{schema}}.service_locks AS l
    SET token = l.token + CASE WHEN n.id IS NULL THEN 0 ELSE 1 END,
        instance_id = n.instance_id, instance = n.instance, hostname = n.hostname, pid = n.pid, holder = n.holder,
        ttl = n.ttl, waiter = n.id, acquired_at = clock_timestamp(), renewed_at = clock_timestamp(),
        expires_at = clock_timestamp() + n.ttl
    FROM next_waiter AS n
    WHERE l.name = n.name
    RETURNING l.name, l.token, l.instance_id, l.waiter
), dequeued AS (
    DELETE FROM {{schema}}.lock_waiters WHERE id IN (SELECT waiter FROM granted)
)
SELECT name, token, instance_id, waiter,
       CASE WHEN waiter IS NOT NULL
            THEN pg_notify('{{channel}}', format('granted:%%s:%%s:%%s', instance_id, waiter, token))::text
            ELSE {without_waiter} END
FROM granted
"""


OWN_LOCK = "l.name = %(name)s AND l.token = %(token)s AND l.instance_id = %(me)s"
# Without a waiter, the token does not change, and the commit does not wait for the disk: if the server crashes before
# the release is on disk, the lock is free after its `ttl`.
RELEASE = Statement(grant_to_next(OWN_LOCK, without_waiter="set_config('synchronous_commit', 'off', true)"))
GRANT_FREE = Statement(grant_to_next(f"l.name = ANY (%(names)s::text[]) AND {FREE}"))
# Locks beyond the limit are free as well, because their instance is gone: a waiter that polls is granted them.
GRANT_LOCKS_OF_DEAD = Statement(grant_to_next("l.instance_id = ANY (%(dead)s::int[])", limit=str(BATCH)))

# For a lock whose row a transaction has locked with GUARD. The token does not change, so this statement does not wait.
# The lock is granted to the next waiter when that transaction has ended.
RELEASE_WITHOUT_GRANT = Statement(f"""
UPDATE {{schema}}.service_locks AS l SET instance_id = NULL, waiter = NULL WHERE {OWN_LOCK} RETURNING l.name
""")
RELEASED = "l.name = %(name)s AND l.token = %(token)s AND l.instance_id IS NULL"
GRANT_RELEASED = Statement(grant_to_next(RELEASED))
IS_RELEASED = Statement(f"SELECT l.name FROM {{schema}}.service_locks AS l WHERE {RELEASED}")

# The state of these waiters, from one snapshot. A waiter with a token was granted the lock; a waiter without one is in
# the queue. A waiter that is missing was granted the lock, missed the notification, and let its `ttl` expire.
READ_WAITERS = Statement("""
SELECT waiter, token
FROM {schema}.service_locks
WHERE instance_id = %(me)s AND waiter = ANY (%(waiters)s::int8[])
UNION ALL
SELECT id, NULL
FROM {schema}.lock_waiters
WHERE id = ANY (%(waiters)s::int8[])
""")

# The rows of an instance: the locks that it holds, and its waiters, which have no token.
READ_OWN_ROWS = Statement("""
SELECT name, token, waiter
FROM {schema}.service_locks
WHERE instance_id = %(me)s
UNION ALL
SELECT name, NULL, id
FROM {schema}.lock_waiters
WHERE instance_id = %(me)s
""")

# Returns no row if the waiter was granted the lock meanwhile.
LEAVE_QUEUE = Statement("DELETE FROM {schema}.lock_waiters WHERE id = %(waiter)s RETURNING id")
DELETE_WAITERS_OF_DEAD = Statement("DELETE FROM {schema}.lock_waiters WHERE instance_id = ANY (%(dead)s::int[])")

# Returns a row for each lock that the instance still holds, and whether it was renewed. It was not renewed if another
# transaction has locked its row, as an operator's release does. The statement runs in the link's thread, so it must not
# wait for such a transaction.
RENEW = Statement("""
WITH ours AS MATERIALIZED (
    SELECT l.name, l.token
    FROM unnest(%(names)s::text[], %(tokens)s::int8[]) AS h (name, token)
    JOIN {schema}.service_locks AS l ON l.name = h.name AND l.token = h.token
    WHERE l.instance_id = %(me)s
), free AS MATERIALIZED (
    SELECT l.name
    FROM ours AS o
    JOIN {schema}.service_locks AS l ON l.name = o.name AND l.token = o.token
    WHERE l.instance_id = %(me)s
    ORDER BY l.name
    FOR NO KEY UPDATE OF l SKIP LOCKED
), renewed AS (
    UPDATE {schema}.service_locks AS l
    SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + l.ttl
    FROM free AS f
    WHERE l.name = f.name
    RETURNING l.name
)
SELECT o.name, o.token, r.name IS NOT NULL
FROM ours AS o
LEFT JOIN renewed AS r ON r.name = o.name
""")

# Returns each of these locks that has another holder or another token now, and for how long; not the locks that an
# operator released.
READ_OTHER_HOLDERS = Statement("""
SELECT l.name, h.token, l.token, l.instance, extract(epoch FROM clock_timestamp() - l.acquired_at)::float8
FROM unnest(%(names)s::text[], %(tokens)s::int8[]) AS h (name, token)
JOIN {schema}.service_locks AS l ON l.name = h.name
WHERE l.instance_id IS NOT NULL AND (l.token <> h.token OR l.instance_id <> %(me)s)
  AND NOT EXISTS (SELECT FROM {schema}.lock_releases AS r WHERE r.name = h.name AND r.token = h.token)
""")

INSERT_OVERLAP = Statement("""
INSERT INTO {schema}.lock_overlaps (name, token, instance, other_token, other)
VALUES (%(name)s, %(token)s, %(instance)s, %(other_token)s, %(other)s)
""")

GUARD = Statement("""
SELECT name
FROM {schema}.service_locks
WHERE name = %(name)s AND token = %(token)s AND instance_id = %(me)s
FOR KEY SHARE
""")

READ_HOLDER = Statement("SELECT instance, holder, acquired_at FROM {schema}.service_locks WHERE name = %(name)s")

# Deadlock check: walk the wait-for graph from the waiters that hold the wanted lock. Only the newest waiter of a cycle
# fails, so that the others can go on.
FIND_DEADLOCK = Statement("""
WITH RECURSIVE chain AS (
    SELECT w.id, w.name, ARRAY[w.id] AS ids, ARRAY[%(name)s::text, w.name] AS names
    FROM {schema}.lock_waiters AS w
    WHERE %(name)s = ANY (w.held)
    UNION ALL
    SELECT w.id, w.name, c.ids || w.id, c.names || w.name
    FROM chain AS c
    JOIN {schema}.lock_waiters AS w ON c.name = ANY (w.held)
    WHERE w.id <> ALL (c.ids)
)
SELECT names
FROM chain
WHERE name = ANY (%(held)s::text[]) AND %(waiter)s >= ALL (ids)
LIMIT 1
""")
