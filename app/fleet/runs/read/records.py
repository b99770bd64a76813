"""Runs as clients read them: from `runs` while they are pending or running, from `finished_runs` afterwards.

A run keeps its id. One statement reads both tables at one moment, so it finds a run that is moving in one of them,
never in both or none.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from psycopg.rows import class_row

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.db.stored_json import StoredJsonLoader
from app.fleet.errors import RunUnknown
from app.fleet.runs.effects.states import RunState

Trigger = Literal["schedule", "api", "code"]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run. `payload`, `result` and `progress` are parsed JSON."""

    id: int
    action: str
    state: RunState
    trigger: Trigger
    payload: Any
    scheduled_for: datetime | None
    run_at: datetime
    ordering_key: str | None
    attempt: int
    max_attempts: int
    instance: str | None
    result: Any
    error: str | None
    progress: Any
    # The run in whose attempt it was triggered.
    triggered_by: int | None
    # The HTTP request that triggered it, directly or through other runs, and the trace of that request.
    request_id: str | None
    trace_id: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None

    def __post_init__(self) -> None:
        # PostgreSQL returns a text. A newer release may have states that this one does not know.
        with suppress(ValueError):
            object.__setattr__(self, "state", RunState(self.state))


# The trace's id is the second field of `trace_parent`, which has the form of the header `traceparent`.
ORIGIN = "r.triggered_by, r.request_id, substr(r.trace_parent, 4, 32) AS trace_id"
ACTIVE_COLUMNS = f"""
r.id, a.name AS action, r.state, r.trigger, coalesce(r.payload, '{{}}'::json) AS payload, r.scheduled_for, r.run_at,
r.ordering_key, r.attempt, r.max_attempts, r.instance, NULL::json AS result, r.error, r.progress,
{ORIGIN}, r.created_at, r.started_at, NULL::timestamptz AS finished_at
"""
FINISHED_COLUMNS = f"""
r.id, a.name AS action, r.state, r.trigger, coalesce(r.payload, '{{}}'::json) AS payload, r.scheduled_for, r.run_at,
r.ordering_key, r.attempt, r.max_attempts, r.instance, r.result, r.error, r.progress,
{ORIGIN}, r.created_at, r.started_at, r.finished_at
"""

FIND = Statement(f"""
SELECT {ACTIVE_COLUMNS}
FROM {{schema}}.runs AS r
JOIN {{schema}}.actions AS a ON a.id = r.action_id
WHERE r.id = ANY (%(ids)s)
UNION ALL
SELECT {FINISHED_COLUMNS}
FROM {{schema}}.finished_runs AS r
JOIN {{schema}}.actions AS a ON a.id = r.action_id
WHERE r.id = ANY (%(ids)s)
""")


async def find(connection: Connection, namespace: Namespace, run_id: int) -> RunRecord:
    found = await find_all(connection, namespace, [run_id])
    if not found:
        raise RunUnknown(f"there is no run {run_id}, or it ended so long ago that it was deleted")
    return found[0]


async def find_all(connection: Connection, namespace: Namespace, run_ids: Sequence[int]) -> list[RunRecord]:
    async with connection.cursor(row_factory=class_row(RunRecord)) as cursor:
        cursor.adapters.register_loader("json", StoredJsonLoader)
        await cursor.execute(namespace.sql(FIND), {"ids": list(run_ids)})
        return await cursor.fetchall()


async def change(connection: Connection, namespace: Namespace, statement: Statement, run_id: int) -> RunRecord | None:
    """Change a run by a statement that returns the changed run; None if its state does not allow the change."""
    async with connection.cursor(row_factory=class_row(RunRecord)) as cursor:
        cursor.adapters.register_loader("json", StoredJsonLoader)
        await cursor.execute(namespace.sql(statement), {"id": run_id})
        return await cursor.fetchone()
