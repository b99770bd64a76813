"""The runs that a run has triggered, by the index on `triggered_by` and the id: newest first, as lists show them.

Both statements stop after a number of entries of the index, however many runs there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg.rows import class_row

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.db.stored_json import StoredJsonLoader
from app.fleet.runs.read.pages import FROM_ACTIVE, FROM_FINISHED, NEWEST, ListedRun, branch_of_action

# Counting stops here.
MAX_COUNT = 1000

# `IS NOT NULL` is the condition of the partial indexes, which the planner does not derive from the range.
TRIGGERED = " UNION ALL ".join(
    branch_of_action(table, "r.triggered_by IS NOT NULL", "r.triggered_by", "%(run)s")
    for table in ("runs", "finished_runs")
)

LIST = Statement(f"""
WITH page AS MATERIALIZED (
    SELECT id FROM ({TRIGGERED}) AS branches ORDER BY id DESC LIMIT %(limit)s
)
{FROM_ACTIVE} WHERE r.id = ANY (ARRAY(SELECT id FROM page))
UNION ALL
{FROM_FINISHED} WHERE r.id = ANY (ARRAY(SELECT id FROM page))
ORDER BY id DESC
""")
COUNT = Statement(f"SELECT count(*) FROM ({TRIGGERED}) AS branches")


@dataclass(frozen=True, slots=True)
class TriggeredRuns:
    """The newest runs that a run has triggered, and how many there are: more than `MAX_COUNT` are not all counted."""

    newest: Sequence[ListedRun]
    count: int


async def find_triggered(connection: Connection, namespace: Namespace, run_id: int, *, limit: int) -> TriggeredRuns:
    values = {"run": run_id, "limit": limit, "before": NEWEST, "after": 0}
    async with connection.cursor(row_factory=class_row(ListedRun)) as cursor:
        cursor.adapters.register_loader("json", StoredJsonLoader)
        # Planned for these values, as pages of runs are.
        await cursor.execute(namespace.sql(LIST), values, prepare=False)
        newest = await cursor.fetchall()
    if len(newest) < limit:
        return TriggeredRuns(newest, len(newest))
    counted = await connection.execute(namespace.sql(COUNT), values | {"limit": MAX_COUNT + 1}, prepare=False)
    ((count,),) = await counted.fetchall()
    return TriggeredRuns(newest, count)
