"""Executes a statement on any kind of connection: one of the pool, or the one inside an SQLAlchemy session.

So the fleet's writes can be part of the caller's transaction, whichever of them the caller uses.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

import psycopg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Connection

Place: TypeAlias = AsyncSession | AsyncConnection | Connection

# At the begin of a transaction that locks rows which others need: a frozen process must not hold them for longer than
# its lease.
SHORT_IDLE = Statement("SELECT set_config('idle_in_transaction_session_timeout', '5000', true)")


def array(values: Iterable[float | datetime | None]) -> str:
    """Return numbers and instants as a PostgreSQL array in text form, far faster than the driver adapts them."""
    return f"{{{','.join([element(value) for value in values])}}}"


def element(value: float | datetime | None) -> str:
    if value is None:
        return "NULL"
    return value.isoformat() if isinstance(value, datetime) else str(value)


async def fetch(target: Place, statement: bytes, values: Mapping[str, Any] | None = None) -> Sequence[tuple[Any, ...]]:
    """Execute a statement and return its rows; an empty list if it returns none."""
    if isinstance(target, psycopg.AsyncConnection):
        cursor = await target.execute(statement, values)
        return await cursor.fetchall() if cursor.description else []
    connection = await target.connection() if isinstance(target, AsyncSession) else target
    result = await connection.exec_driver_sql(statement.decode(), dict(values or {}))
    return [tuple(row) for row in result] if result.returns_rows else []
