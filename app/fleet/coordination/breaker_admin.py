"""List the breakers, and close one by hand, for operators.

Closing is one transition of the row (`CLOSE_BY_HAND`), and notifies all instances as the other transitions do. An
instance that does not receive the notification reads the state again after `STATE_LIFETIME`, because it is open there.
If the other system still fails, the breaker opens again as it did the first time.

A breaker that is closed already stays as it is: its probe may have closed it a moment before.
"""

from dataclasses import dataclass

from psycopg.rows import class_row

from app.fleet.coordination.breaker_statements import CLOSE_BY_HAND
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.db.pool.statements import fetch
from app.fleet.errors import BreakerInvalid
from app.fleet.telemetry.logs import event_log
from app.fleet.validation import check_name

log = event_log(__name__)

# Open breakers first. `within` is an argument of the calls and not in the row, so the row does not say which failures
# still count: those in it counted when the last of them was written.
LIST = Statement("""
SELECT b.name, extract(epoch FROM b.open_until - clock_timestamp())::float8 AS open_seconds, b.openings,
       cardinality(b.failed_at) AS failures,
       extract(epoch FROM clock_timestamp() - (SELECT max(at) FROM unnest(b.failed_at) AS at))::float8
       AS failure_age,
       i.name AS probed_by,
       CASE WHEN i.name IS NOT NULL THEN extract(epoch FROM b.probe_until - clock_timestamp())::float8 END
       AS probe_seconds
FROM {schema}.breakers AS b
LEFT JOIN {schema}.instances AS i
       ON i.id = b.probe_instance AND i.state <> 'gone' AND b.probe_until > clock_timestamp()
ORDER BY b.open_until IS NULL, b.name
LIMIT %(limit)s
""")


@dataclass(frozen=True, slots=True)
class BreakerRecord:
    """A breaker that has failed at least once."""

    name: str
    # For how long it refuses every block; not positive if a probe may enter. None while it is closed.
    open_seconds: float | None
    # Openings without a success in between.
    openings: int
    # The failures that counted when the last of them was written, and how many seconds ago that was.
    failures: int
    failure_age: float | None
    # The instance whose probe runs, and for how long the others wait for its result.
    probed_by: str | None
    probe_seconds: float | None


async def list_breakers(connection: Connection, namespace: Namespace, *, limit: int) -> list[BreakerRecord]:
    async with connection.cursor(row_factory=class_row(BreakerRecord)) as cursor:
        await cursor.execute(namespace.sql(LIST), {"limit": limit})
        return await cursor.fetchall()


async def close(connection: Connection, namespace: Namespace, name: str, *, by: str) -> bool:
    """Close a breaker for all instances; return false if it was not open."""
    check_name("breaker", name, BreakerInvalid)
    rows = await fetch(connection, namespace.sql(CLOSE_BY_HAND), {"name": name})
    if rows:
        log.warning("breaker.closed_by_hand", breaker=name, token=rows[0][0], by=by)
    return bool(rows)
