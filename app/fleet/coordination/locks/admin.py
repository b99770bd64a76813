"""List the locks that are held, and release a lock by force, for operators.

A forced release increments the token, in the transaction that records the operator and the reason. So the next guarded
write of the former holder is refused, whether or not its instance was notified. The notification cancels its block at
once; if it is lost, the renewal after the next heartbeat detects the release.

A forced release waits for a transaction that is guarded by the lock at the moment, but at most `PATIENCE`. That
transaction may still commit, and no later one of the former holder.
"""

from dataclasses import dataclass
from datetime import datetime

import psycopg
from psycopg.rows import class_row

from app.fleet.cluster.registry import Session
from app.fleet.coordination.locks import statements
from app.fleet.coordination.locks.held import RESERVED
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection, Database
from app.fleet.errors import LockInvalid, LockTaken, LockUnknown
from app.fleet.telemetry.logs import event_log
from app.fleet.validation import check_name

PATIENCE = "5s"
MAX_REASON_LENGTH = 1000

log = event_log(__name__)

LIST = Statement("""
SELECT l.name, l.token, l.instance, l.instance_id, l.hostname, l.pid, l.holder, l.acquired_at, l.renewed_at,
       l.expires_at, (SELECT count(*) FROM {schema}.lock_waiters AS w WHERE w.name = l.name) AS waiting
FROM {schema}.service_locks AS l
WHERE l.instance_id IS NOT NULL AND (%(name)s::text IS NULL OR l.name = %(name)s)
ORDER BY l.name
LIMIT %(limit)s::int8
""")

SET_TIMEOUT = Statement("SELECT set_config('lock_timeout', %(patience)s, true)")

LOCK_ROW = Statement("""
SELECT token, instance_id, instance, holder, acquired_at
FROM {schema}.service_locks
WHERE name = %(name)s AND instance_id IS NOT NULL
FOR UPDATE
""")

INSERT_RELEASE = Statement("""
INSERT INTO {schema}.lock_releases (name, token, instance, holder, acquired_at, reason, released_by)
VALUES (%(name)s, %(token)s, %(instance)s, %(holder)s, %(acquired_at)s, %(reason)s, %(by)s)
""")

RELEASE = Statement("""
UPDATE {schema}.service_locks
SET token = token + 1, instance_id = NULL, waiter = NULL
WHERE name = %(name)s
""")

NOTIFY = Statement("""
SELECT pg_notify('{channel}', format('released:%%s:%%s:%%s', %(instance_id)s::int, %(token)s::int8, %(name)s::text))
""")


NAMES_BY_INSTANCE = Statement("""
SELECT l.instance_id, array_agg(l.name ORDER BY l.name) AS names
FROM {schema}.service_locks AS l
WHERE l.instance_id IS NOT NULL
GROUP BY l.instance_id
""")


@dataclass(frozen=True, slots=True)
class LockRecord:
    """A lock that is held, as REST and the command line show it."""

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

    @property
    def singleton(self) -> str | None:
        """The name of the singleton whose lock it is."""
        return self.name.removeprefix(RESERVED) if self.name.startswith(RESERVED) else None


async def list_locks(
    connection: Connection, namespace: Namespace, name: str | None = None, *, limit: int | None = None
) -> list[LockRecord]:
    """Return the locks that are held, at most `limit`; with `name`, at most the lock of this name."""
    async with connection.cursor(row_factory=class_row(LockRecord)) as cursor:
        await cursor.execute(namespace.sql(LIST), {"name": name, "limit": limit})
        return await cursor.fetchall()


async def lock_names(database: Database) -> dict[int, list[str]]:
    """Return the names of held locks by instance id; an instance that holds none is missing."""
    async with database.connection() as connection:
        cursor = await connection.execute(database.namespace.sql(NAMES_BY_INSTANCE))
        return dict(await cursor.fetchall())


def read_lock_names(session: Session, namespace: Namespace) -> dict[int, list[str]]:
    """Do the same on a synchronous session."""
    return dict(session.execute(namespace.sql(NAMES_BY_INSTANCE)).fetchall())


async def force_release(connection: Connection, namespace: Namespace, name: str, *, reason: str, by: str) -> LockRecord:
    """Release a lock, whichever instance holds it, in the transaction of this connection; return its former record."""
    check_name("lock", name, LockInvalid)
    if not 0 < len(reason.strip()) <= MAX_REASON_LENGTH or not reason.isprintable():
        raise LockInvalid(
            f"a forced release needs a reason, which is kept: at most {MAX_REASON_LENGTH} printable characters"
        )
    await connection.execute(SET_TIMEOUT, {"patience": PATIENCE})
    try:
        row = await (await connection.execute(namespace.sql(LOCK_ROW), {"name": name})).fetchone()
    except psycopg.errors.LockNotAvailable:
        raise LockTaken(
            f"a transaction that is guarded by the lock {name!r} has been open for {PATIENCE}, and may still commit: "
            f"find it in pg_stat_activity, end it with pg_terminate_backend, and try again"
        ) from None
    if row is None:
        raise LockUnknown(f"no lock called {name!r} is held: `flotilla locks` or GET /locks lists the locks that are")
    (record,) = await list_locks(connection, namespace, name)
    token, instance_id, instance, holder, acquired_at = row
    values = {"name": name, "token": token, "instance_id": instance_id, "reason": reason.strip(), "by": by}
    values |= {"instance": instance, "holder": holder, "acquired_at": acquired_at}
    await connection.execute(namespace.sql(INSERT_RELEASE), values)
    await connection.execute(namespace.sql(RELEASE), values)
    await connection.execute(namespace.sql(NOTIFY), values)
    await connection.execute(namespace.sql(statements.GRANT_FREE), {"names": [name]})
    log.warning("lock.forced", lock=name, token=token, instance=instance, reason=reason.strip(), by=by)
    return record
