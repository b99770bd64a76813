"""How much of the limits of actions is used: of `concurrency`, and of `rate`.

Claims count the running runs and advance `rate_used_until` in the same way (`runs/claim.py`), so this shows what the
next claim finds. A claim may start a run `RATE_TOLERANCE` earlier than shown.
"""

from dataclasses import dataclass

from psycopg.rows import class_row

from app.fleet.coordination.rate_use import RateUse
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection

READ_LIMITED = Statement("""
SELECT a.name, a.concurrency, a.rate_interval, a.rate_burst,
       extract(epoch FROM a.rate_used_until - clock_timestamp())::float8 AS ahead,
       CASE WHEN a.concurrency IS NOT NULL THEN (
           SELECT count(*) FROM {schema}.runs AS r WHERE r.action_id = a.id AND r.state = 'running'
       ) END AS running
FROM {schema}.actions AS a
WHERE a.concurrency IS NOT NULL OR a.rate_interval IS NOT NULL
ORDER BY a.name
LIMIT %(limit)s
""")


@dataclass(frozen=True, slots=True)
class LimitedAction(RateUse):
    """An action with a limit. Without a rate, its `rate` is None; without a `concurrency`, its running runs are."""

    concurrency: int | None
    running: int | None


async def read_limited(connection: Connection, namespace: Namespace, *, limit: int) -> list[LimitedAction]:
    async with connection.cursor(row_factory=class_row(LimitedAction)) as cursor:
        await cursor.execute(namespace.sql(READ_LIMITED), {"limit": limit})
        return await cursor.fetchall()
