"""Run a statement of ours wherever there is a connection: the pool's own, or the one inside an SQLAlchemy session.

So that what the fleet writes can be part of the caller's transaction, in whichever way the caller talks to PostgreSQL.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

import psycopg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from app.fleet.db.pool import Connection

Place: TypeAlias = AsyncSession | AsyncConnection | Connection


def array(values: Iterable[float | datetime | None]) -> str:
    """Write numbers and instants as PostgreSQL writes an array: an element at a time, the driver takes far longer."""
    return f"{{{','.join([element(value) for value in values])}}}"


def element(value: float | datetime | None) -> str:
    if value is None:
        return "NULL"
    return value.isoformat() if isinstance(value, datetime) else str(value)


async def fetch(place: Place, statement: bytes, values: Mapping[str, Any] | None = None) -> Sequence[tuple[Any, ...]]:
    """Run it and return its rows; an empty list from a statement that has none."""
    if isinstance(place, psycopg.AsyncConnection):
        cursor = await place.execute(statement, values)
        return await cursor.fetchall() if cursor.description else []
    connection = await place.connection() if isinstance(place, AsyncSession) else place
    result = await connection.exec_driver_sql(statement.decode(), dict(values or {}))
    return [tuple(row) for row in result] if result.returns_rows else []
