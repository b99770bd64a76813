"""Runs as the database has them, with their events and their last checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Connection, Database
from app.fleet.errors import RunUnknown
from app.fleet.runs.effects.events import StoredEvent, read_pages
from app.fleet.runs.read.records import RunRecord, find_all

FIND_IDS = Statement("""
SELECT r.id
FROM (
    SELECT id, action_id FROM {schema}.runs UNION ALL SELECT id, action_id FROM {schema}.finished_runs
) AS r
JOIN {schema}.actions AS a ON a.id = r.action_id
WHERE %(action)s::text IS NULL OR a.name = %(action)s
ORDER BY r.id
""")
READ_CHECKPOINTS = Statement("""
SELECT id, checkpoint FROM {schema}.runs WHERE id = ANY (%(ids)s) AND checkpoint IS NOT NULL
UNION ALL
SELECT id, checkpoint FROM {schema}.finished_runs WHERE id = ANY (%(ids)s) AND checkpoint IS NOT NULL
""")

# In which time a pending run is due, whether its action is paused, and which run it waits for.
WHY_NOT = Statement("""
SELECT extract(epoch FROM r.run_at - clock_timestamp())::float8, a.paused_at IS NOT NULL,
       (SELECT min(e.id) FROM {schema}.runs AS e
        WHERE e.action_id = r.action_id AND e.ordering_key = r.ordering_key AND e.id < r.id)
FROM {schema}.runs AS r
JOIN {schema}.actions AS a ON a.id = r.action_id
WHERE r.id = %(id)s
""")


@dataclass(frozen=True, slots=True)
class StoredRun(RunRecord):
    """A run: its state, result, error, attempt and more, its events, and the value of its last checkpoint."""

    events: Sequence[StoredEvent]
    last_checkpoint: Any


async def find_ids(database: Database, action: str | None) -> list[int]:
    """Return the ids of the runs of an action, or of all runs, oldest first."""
    async with database.autocommit() as connection:
        rows = await (await connection.execute(database.namespace.sql(FIND_IDS), {"action": action})).fetchall()
    return [row[0] for row in rows]


async def read_runs(database: Database, ids: Sequence[int]) -> list[StoredRun]:
    """Return these runs, in this order."""
    async with database.autocommit() as connection:
        records = {each.id: each for each in await find_all(connection, database.namespace, ids)}
        values = {"ids": list(ids)}
        rows = await (await connection.execute(database.namespace.sql(READ_CHECKPOINTS), values)).fetchall()
        checkpoints = dict(rows)
        found = []
        for run_id in ids:
            if run_id not in records:
                raise RunUnknown(f"there is no run {run_id}")
            own = {each.name: getattr(records[run_id], each.name) for each in fields(RunRecord)}
            events = await read_events(connection, database, run_id)
            found.append(StoredRun(**own, events=events, last_checkpoint=checkpoints.get(run_id)))
    return found


async def read_events(connection: Connection, database: Database, run_id: int) -> list[StoredEvent]:
    found: list[StoredEvent] = []
    while page := (await read_pages(connection, database.namespace, {run_id: len(found)})).get(run_id):
        found += page.events
        if not page.events:
            break
    return found
