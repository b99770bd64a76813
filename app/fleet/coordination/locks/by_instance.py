"""The names of the locks that each instance holds, for `GET /health/instances` and `flotilla list`."""

from app.fleet.cluster.registry import Session
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Database

NAMES_BY_INSTANCE = Statement("""
SELECT l.instance_id, array_agg(l.name ORDER BY l.name) AS names
FROM {schema}.service_locks AS l
WHERE l.instance_id IS NOT NULL
GROUP BY l.instance_id
""")


async def lock_names(database: Database) -> dict[int, list[str]]:
    """Return the names of held locks by instance id; an instance that holds none is missing."""
    async with database.connection() as connection:
        cursor = await connection.execute(database.namespace.sql(NAMES_BY_INSTANCE))
        return dict(await cursor.fetchall())


def read_lock_names(session: Session, namespace: Namespace) -> dict[int, list[str]]:
    """Do the same on a synchronous session."""
    return dict(session.execute(namespace.sql(NAMES_BY_INSTANCE)).fetchall())
