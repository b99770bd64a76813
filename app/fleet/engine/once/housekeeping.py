"""Housekeeping of the seen-store, by the leader: it prunes old keys and reports keys that stay pending.

It prunes keys that have been free or expired for more than a minute. Within this minute, a block may still have an
older token; while the row exists, that token cannot take the key. It also prunes keys that have been pending for more
than a day and whose owner has ended: no block has asked for them since.
"""

from collections.abc import Sequence
from datetime import datetime

from app.fleet.cluster.anomalies import Anomaly
from app.fleet.cluster.registry import Instance
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.engine.once.statements import OWNER_IS_ALIVE

PRUNE = Statement(f"""
WITH old AS MATERIALIZED (
    SELECT ctid, expires_at
    FROM {{schema}}.once_keys
    WHERE state <> 'pending' AND expires_at >= %(floor)s
      AND expires_at < statement_timestamp() - interval '1 minute'
    ORDER BY expires_at
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), abandoned AS MATERIALIZED (
    SELECT k.ctid
    FROM {{schema}}.once_keys AS k
    WHERE k.state = 'pending' AND k.taken_at < statement_timestamp() - interval '1 day' AND NOT {OWNER_IS_ALIVE}
    ORDER BY k.taken_at
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM {{schema}}.once_keys
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM old UNION ALL SELECT ctid FROM abandoned))
    RETURNING 1
)
SELECT count(*), (SELECT max(expires_at) FROM old) FROM deleted
""")

PENDING_TOO_LONG = Statement(f"""
SELECT k.scope, count(*), min(k.taken_at)
FROM {{schema}}.once_keys AS k
WHERE k.state = 'pending' AND k.taken_at < statement_timestamp() - interval '1 hour' AND {OWNER_IS_ALIVE}
GROUP BY k.scope
ORDER BY k.scope
""")


async def prune_keys(connection: Connection, namespace: Namespace, floor: datetime, batch: int) -> tuple[int, datetime]:
    """Delete up to so many old keys that expired at `floor` or later; return how many, and the latest expiry."""
    values = {"floor": floor, "batch": batch}
    row = await (await connection.execute(namespace.sql(PRUNE), values)).fetchone()
    assert row is not None
    return row[0], row[1] or floor


async def pending_too_long(connection: Connection, namespace: Namespace) -> list[tuple[str, int, datetime]]:
    """Return the scopes with keys that a living owner has had for more than an hour: how many, and since when."""
    return await (await connection.execute(namespace.sql(PENDING_TOO_LONG))).fetchall()


async def find_pending_too_long(connection: Connection, namespace: Namespace, _: Sequence[Instance]) -> list[Anomaly]:
    """Report `once_pending` for each scope with such keys."""
    return [
        Anomaly(
            "once_pending",
            scope,
            since,
            f"{count} keys of {scope!r} have been pending for more than an hour, the first since "
            f"{since:%Y-%m-%d %H:%M:%S %Z}: the owner is alive, but its block has not ended",
        )
        for scope, count, since in await pending_too_long(connection, namespace)
    ]
