"""Who holds which lock, and how an operator ends it.

A forced release moves the token on, in the transaction that writes down who did it and why. So the former holder's
next guarded write is refused, whether or not it has heard; a notification has its body cancelled at once, and if that
is lost, the next heartbeat's renewal finds out. It waits for a transaction that is guarded by the lock right now, for
`PATIENCE` at the most: that one may still commit, and nothing after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import psycopg
from psycopg.rows import class_row

from app.fleet.coordination.locks.statements import PASS_ON_FREE
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Connection
from app.fleet.errors import LockInvalid, LockTaken, LockUnknown
from app.fleet.telemetry.logs import events
from app.fleet.validation import check_name

PATIENCE = "5s"
REASON_MOST = 1000

log = events(__name__)

LIST = Statement("""
SELECT l.name, l.token, l.instance, l.instance_id, l.hostname, l.pid, l.holder, l.acquired_at, l.renewed_at,
       l.expires_at, (SELECT count(*) FROM {schema}.lock_waiters AS w WHERE w.name = l.name) AS waiting
FROM {schema}.service_locks AS l
WHERE l.instance_id IS NOT NULL AND (%(name)s::text IS NULL OR l.name = %(name)s)
ORDER BY l.name
""")

LIMITED = Statement("SELECT set_config('lock_timeout', %(patience)s, true)")

SEIZE = Statement("""
SELECT token, instance_id, instance, holder, acquired_at
FROM {schema}.service_locks
WHERE name = %(name)s AND instance_id IS NOT NULL
FOR UPDATE
""")

WRITE_DOWN = Statement("""
INSERT INTO {schema}.lock_releases (name, token, instance, holder, acquired_at, reason, released_by)
VALUES (%(name)s, %(token)s, %(instance)s, %(holder)s, %(acquired_at)s, %(reason)s, %(by)s)
""")

FORCE = Statement("""
UPDATE {schema}.service_locks
SET token = token + 1, instance_id = NULL, waiter = NULL
WHERE name = %(name)s
""")

TELL = Statement("""
SELECT pg_notify('{channel}', format('released:%%s:%%s:%%s', %(instance_id)s::int, %(token)s::int8, %(name)s::text))
""")


@dataclass(frozen=True, slots=True)
class LockRecord:
    """A lock that is held, as everyone sees it."""

    name: str
    token: int
    instance: str
    instance_id: int
    hostname: str
    pid: int
    holder: str | None
    acquired_at: datetime
    renewed_at: datetime
    expires_at: datetime
    waiting: int


async def list_locks(connection: Connection, namespace: Namespace, name: str | None = None) -> Sequence[LockRecord]:
    """Return the locks that are held; or the one of this name, if it is."""
    async with connection.cursor(row_factory=class_row(LockRecord)) as cursor:
        await cursor.execute(namespace.sql(LIST), {"name": name})
        return await cursor.fetchall()


async def force(connection: Connection, namespace: Namespace, name: str, *, reason: str, by: str) -> LockRecord:
    """Release a lock whoever holds it, in the transaction of this connection; return what it was."""
    check_name("lock", name, LockInvalid)
    if not 0 < len(reason.strip()) <= REASON_MOST or not reason.isprintable():
        raise LockInvalid(f"a forced release needs a reason, of at most {REASON_MOST} printable letters: it is kept")
    await connection.execute(LIMITED, {"patience": PATIENCE})
    try:
        seized = await (await connection.execute(namespace.sql(SEIZE), {"name": name})).fetchone()
    except psycopg.errors.LockNotAvailable:
        raise LockTaken(
            f"a transaction that is guarded by the lock {name!r} has been open for {PATIENCE}, and may still commit: "
            f"find it in pg_stat_activity, end it with pg_terminate_backend, and try again"
        ) from None
    if seized is None:
        raise LockUnknown(f"nobody holds a lock called {name!r}: `flotilla locks` or GET /locks lists those there are")
    (record,) = await list_locks(connection, namespace, name)
    token, instance_id, instance, holder, acquired_at = seized
    values = {"name": name, "token": token, "instance_id": instance_id, "reason": reason.strip(), "by": by}
    values |= {"instance": instance, "holder": holder, "acquired_at": acquired_at}
    await connection.execute(namespace.sql(WRITE_DOWN), values)
    await connection.execute(namespace.sql(FORCE), values)
    await connection.execute(namespace.sql(TELL), values)
    await connection.execute(namespace.sql(PASS_ON_FREE), {"names": [name]})
    log.warning("lock.forced", lock=name, token=token, instance=instance, reason=reason.strip(), by=by)
    return record
