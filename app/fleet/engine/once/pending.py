"""The keys that are pending, for operators: what is being processed at the moment, by which owner, since when.

A key is pending while its owner lives. If the owner has ended, the row is left as it is, and the key is free: the next
block that asks for it takes it.
"""

from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.engine.once.statements import OWNER_IS_ALIVE

# Counting stops here.
MAX_COUNT = 1000

# `once_keys_pending` is read from its oldest entry on.
READ_OLDEST = Statement(f"""
WITH k AS MATERIALIZED (
    SELECT scope, key, instance_id, run_id, run_token, taken_at
    FROM {{schema}}.once_keys
    WHERE state = 'pending'
    ORDER BY taken_at
    LIMIT %(limit)s
)
SELECT k.scope, k.key, k.taken_at, k.run_id, i.name AS instance, {OWNER_IS_ALIVE} AS alive
FROM k
LEFT JOIN {{schema}}.instances AS i ON i.id = k.instance_id
ORDER BY k.taken_at
""")
# ORDER BY makes the planner read the index, whatever it expects of the table.
COUNT = Statement(f"""
SELECT count(*)
FROM (SELECT FROM {{schema}}.once_keys WHERE state = 'pending' ORDER BY taken_at LIMIT {MAX_COUNT + 1}) AS k
""")


@dataclass(frozen=True, slots=True)
class PendingKey:
    scope: str
    # It may have personal data.
    key: str
    taken_at: datetime
    # The owner: a run, or code outside of runs on an instance. None for an instance that was pruned.
    run_id: int | None
    instance: str | None
    alive: bool


@dataclass(frozen=True, slots=True)
class Pending:
    """The oldest pending keys, and how many there are: `MAX_COUNT + 1` means more than can be counted."""

    oldest: list[PendingKey]
    count: int


async def read_pending(connection: Connection, namespace: Namespace, *, limit: int) -> Pending:
    async with connection.cursor(row_factory=class_row(PendingKey)) as cursor:
        await cursor.execute(namespace.sql(READ_OLDEST), {"limit": limit})
        oldest = await cursor.fetchall()
    if len(oldest) < limit:
        return Pending(oldest, len(oldest))
    ((count,),) = await (await connection.execute(namespace.sql(COUNT))).fetchall()
    return Pending(oldest, count)
