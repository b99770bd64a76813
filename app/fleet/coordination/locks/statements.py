"""Locks as rows: the statements that take one, pass it on, renew it and guard by it (`lock.py` says what for).

Each is a transaction by itself, and says what it did by the rows it returns.

    statement                        changes a row if                             and moves the token
    TAKE                             it is free, and nobody waits for it          always
    RELEASE                          it is still held under that token            if somebody is let in
    PASS_ON_FREE, PASS_ON_OF_DEAD    it is free; its instance is gone             if somebody is let in
    PASS_ON_UNCLAIMED                it was let go under that token, and no more  if somebody is let in
    LET_GO                           it is still held under that token            never
    RENEW                            it is still held under that token            never

What moves the token takes the row FOR UPDATE first, skipping it if somebody has it; what does not takes it FOR NO KEY
UPDATE, and RENEW skips it as well. GUARD takes it FOR KEY SHARE: beside the latter, never beside the former.
"""

from app.fleet.cluster.registry import BATCH
from app.fleet.db.namespace import Statement

# Told by what is there, never by what is not: an instance that has only just joined may not be visible yet.
FREE = """(
    l.instance_id IS NULL OR l.expires_at <= clock_timestamp()
    OR EXISTS (SELECT FROM {schema}.instances AS g WHERE g.id = l.instance_id AND g.state = 'gone')
)"""

# Whoever declares this instance gone waits for this to commit, and then finds what it took (as in `runs/claim.py`).
ALIVE = "SELECT id FROM {schema}.instances WHERE id = %(me)s AND state <> 'gone' FOR KEY SHARE"

HOLDER = """instance_id = %(me)s, instance = %(instance)s, hostname = %(hostname)s, pid = %(pid)s, holder = %(holder)s,
    ttl = %(ttl)s, waiter = NULL, acquired_at = clock_timestamp(), renewed_at = clock_timestamp(),
    expires_at = clock_timestamp() + %(ttl)s"""

TAKE = Statement(f"""
WITH me AS MATERIALIZED (
    {ALIVE}
), known AS MATERIALIZED (
    SELECT l.name
    FROM {{schema}}.service_locks AS l
    WHERE l.name = %(name)s
), made AS (
    INSERT INTO {{schema}}.service_locks (
        name, token, instance_id, instance, hostname, pid, holder, ttl, acquired_at, renewed_at, expires_at
    )
    SELECT %(name)s, 1, me.id, %(instance)s, %(hostname)s, %(pid)s::int, %(holder)s::text, %(ttl)s::interval,
           clock_timestamp(), clock_timestamp(), clock_timestamp() + %(ttl)s::interval
    FROM me
    WHERE NOT EXISTS (SELECT FROM known)
    ON CONFLICT (name) DO NOTHING
    RETURNING token
), free AS MATERIALIZED (
    SELECT l.name
    FROM me, {{schema}}.service_locks AS l
    WHERE l.name = %(name)s
      AND {FREE}
      AND NOT EXISTS (SELECT FROM {{schema}}.lock_waiters AS w WHERE w.name = l.name)
    FOR UPDATE OF l SKIP LOCKED
), taken AS (
    UPDATE {{schema}}.service_locks AS l
    SET token = l.token + 1, {HOLDER}
    FROM free AS f
    WHERE l.name = f.name
    RETURNING l.token
)
SELECT token FROM made
UNION ALL
SELECT token FROM taken
""")

WAIT = Statement(f"""
WITH me AS MATERIALIZED (
    {ALIVE}
)
INSERT INTO {{schema}}.lock_waiters (name, instance_id, holder, ttl, held)
SELECT %(name)s, me.id, %(holder)s::text, %(ttl)s::interval, %(held)s::text[] FROM me
RETURNING id
""")


def pass_on(which: str, to_nobody: str = "NULL", limit: str = "ALL") -> str:
    """Return the statement that passes these locks on, each to whoever waits longest for it, or to nobody.

    `to_nobody` is computed for the latter.
    """
    return f"""
WITH open AS MATERIALIZED (
    SELECT l.name
    FROM {{schema}}.service_locks AS l
    WHERE {which}
    ORDER BY l.name
    LIMIT {limit}
    FOR UPDATE SKIP LOCKED
), next AS MATERIALIZED (
    SELECT o.name, n.id, n.instance_id, n.instance, n.hostname, n.pid, n.holder, n.ttl
    FROM open AS o
    LEFT JOIN LATERAL (
        SELECT w.id, w.instance_id, i.name AS instance, i.hostname, i.pid, w.holder, w.ttl
        FROM {{schema}}.lock_waiters AS w
        JOIN {{schema}}.instances AS i ON i.id = w.instance_id AND i.state <> 'gone'
        WHERE w.name = o.name
        ORDER BY w.id
        LIMIT 1
        FOR UPDATE OF w SKIP LOCKED
        FOR KEY SHARE OF i SKIP LOCKED
    ) AS n ON true
), passed AS (
    UPDATE {{schema}}.service_locks AS l
    SET token = l.token + CASE WHEN n.id IS NULL THEN 0 ELSE 1 END,
        instance_id = n.instance_id, instance = n.instance, hostname = n.hostname, pid = n.pid, holder = n.holder,
        ttl = n.ttl, waiter = n.id, acquired_at = clock_timestamp(), renewed_at = clock_timestamp(),
        expires_at = clock_timestamp() + n.ttl
    FROM next AS n
    WHERE l.name = n.name
    RETURNING l.name, l.token, l.instance_id, l.waiter
), served AS (
    DELETE FROM {{schema}}.lock_waiters WHERE id IN (SELECT waiter FROM passed)
)
SELECT name, token, instance_id, waiter,
       CASE WHEN waiter IS NOT NULL
            THEN pg_notify('{{channel}}', format('granted:%%s:%%s:%%s', instance_id, waiter, token))::text
            ELSE {to_nobody} END
FROM passed
"""


OURS = "l.name = %(name)s AND l.token = %(token)s AND l.instance_id = %(me)s"
# Released to nobody, no token has moved, and nobody waits for the disk: if the server crashes before it is written, the
# lock is free after its `ttl`.
RELEASE = Statement(pass_on(OURS, to_nobody="set_config('synchronous_commit', 'off', true)"))
PASS_ON_FREE = Statement(pass_on(f"l.name = ANY (%(names)s::text[]) AND {FREE}"))
# Those beyond the limit are free as well, because their instance is gone: the next who looks is let in.
PASS_ON_OF_DEAD = Statement(pass_on("l.instance_id = ANY (%(dead)s::int[])", limit=str(BATCH)))

# For a lock whose row somebody guards by: the token stays, so it waits for nobody. Passed on when that has ended.
LET_GO = Statement(f"""
UPDATE {{schema}}.service_locks AS l SET instance_id = NULL, waiter = NULL WHERE {OURS} RETURNING l.name
""")
UNCLAIMED = "l.name = %(name)s AND l.token = %(token)s AND l.instance_id IS NULL"
PASS_ON_UNCLAIMED = Statement(pass_on(UNCLAIMED))
STILL_UNCLAIMED = Statement(f"SELECT l.name FROM {{schema}}.service_locks AS l WHERE {UNCLAIMED}")

# How it stands with those who wait here, in one moment: let in, with a token; or in the queue. Who is in no row of the
# answer was let in, did not hear of it, and let its `ttl` pass.
STANDING = Statement("""
SELECT waiter, token
FROM {schema}.service_locks
WHERE instance_id = %(me)s AND waiter = ANY (%(waiters)s::int8[])
UNION ALL
SELECT id, NULL
FROM {schema}.lock_waiters
WHERE id = ANY (%(waiters)s::int8[])
""")

# The rows of an instance: the locks it holds, and its places in the queues, which have no token.
OWN = Statement("""
SELECT name, token, waiter
FROM {schema}.service_locks
WHERE instance_id = %(me)s
UNION ALL
SELECT name, NULL, id
FROM {schema}.lock_waiters
WHERE instance_id = %(me)s
""")

# Who gives up, and may have been let in this very moment.
STOP_WAITING = Statement("DELETE FROM {schema}.lock_waiters WHERE id = %(waiter)s RETURNING id")
FORGET_WAITERS = Statement("DELETE FROM {schema}.lock_waiters WHERE instance_id = ANY (%(dead)s::int[])")

# One row for each lock that is still ours, and whether it was renewed. It was not if another transaction has its row
# locked: an operator's release, which may be frozen, and this is asked in the link's thread.
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

# Who has these, that we do not have any more; and for how long. None that an operator took away.
OTHERS = Statement("""
SELECT l.name, h.token, l.token, l.instance, extract(epoch FROM clock_timestamp() - l.acquired_at)::float8
FROM unnest(%(names)s::text[], %(tokens)s::int8[]) AS h (name, token)
JOIN {schema}.service_locks AS l ON l.name = h.name
WHERE l.instance_id IS NOT NULL AND (l.token <> h.token OR l.instance_id <> %(me)s)
  AND NOT EXISTS (SELECT FROM {schema}.lock_releases AS r WHERE r.name = h.name AND r.token = h.token)
""")

NOTE_OVERLAP = Statement("""
INSERT INTO {schema}.lock_overlaps (name, token, instance, other_token, other)
VALUES (%(name)s, %(token)s, %(instance)s, %(other_token)s, %(other)s)
""")

GUARD = Statement("""
SELECT name
FROM {schema}.service_locks
WHERE name = %(name)s AND token = %(token)s AND instance_id = %(me)s
FOR KEY SHARE
""")

WHO_HAS = Statement("SELECT instance, holder, acquired_at FROM {schema}.service_locks WHERE name = %(name)s")

# Does one whom I wait for wait for me? From those who hold what I want, to those who hold what they want, and so on.
# The last one to come gives way, so that not all of a circle do.
CIRCLE = Statement("""
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
