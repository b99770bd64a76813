"""Reading the tracebacks of the failed attempts of a run."""

from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection


@dataclass(frozen=True, slots=True)
class StoredTraceback:
    # The token tells apart two attempts with the same number.
    token: int
    attempt: int
    instance: str | None
    error: str
    traceback: str
    at: datetime


FIND = Statement("""
SELECT token, attempt, instance, error, traceback, at
FROM {schema}.run_tracebacks
WHERE run_id = %(id)s
ORDER BY token DESC
LIMIT %(limit)s
""")


async def find_tracebacks(
    connection: Connection, namespace: Namespace, run_id: int, *, limit: int
) -> list[StoredTraceback]:
    """Return the tracebacks of the failed attempts that are stored, newest first."""
    async with connection.cursor(row_factory=class_row(StoredTraceback)) as cursor:
        await cursor.execute(namespace.sql(FIND), {"id": run_id, "limit": limit})
        return await cursor.fetchall()
