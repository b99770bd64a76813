"""Run events: what a run says while it runs, numbered without gaps, and only by the attempt that owns it.

A batch is appended in one statement. It first moves the counter in each run's own row, and only for rows that still
carry the token: that is the fence, and the lock on the row is what keeps two batches from drawing one number. Numbers
begin at 1. A run that is fenced draws none, and none of its events is written.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from app.fleet.db.namespace import Namespace
from app.fleet.db.pool import Connection


class Event(NamedTuple):
    run_id: int
    token: int
    kind: str
    # JSON, checked already.
    data: str | None


# The order within the batch is the order in which they were emitted.
APPEND = """
WITH given AS (
    SELECT *, row_number() OVER (PARTITION BY run_id ORDER BY place) AS nth
    FROM unnest(%(run_ids)s::int8[], %(tokens)s::int8[], %(kinds)s::text[], %(data)s::text[])
         WITH ORDINALITY AS e (run_id, token, kind, data, place)
), counted AS (
    UPDATE {schema}.runs AS r
    SET events = r.events + g.many,
        progress = coalesce(g.progress::json, r.progress)
    FROM (
        SELECT run_id, token, count(*)::int AS many,
               (array_agg(data ORDER BY place DESC) FILTER (WHERE kind = 'progress'))[1] AS progress
        FROM given
        GROUP BY run_id, token
    ) AS g
    WHERE r.id = ANY (%(run_ids)s::int8[]) AND r.id = g.run_id AND r.token = g.token AND r.state <> 'pending'
    RETURNING r.id, r.token, r.events - g.many AS before
), written AS (
    INSERT INTO {schema}.run_events (run_id, seq, kind, data)
    SELECT g.run_id, c.before + g.nth, g.kind, g.data::json
    FROM given AS g
    JOIN counted AS c ON c.id = g.run_id AND c.token = g.token
)
SELECT id, token FROM counted
"""


async def append(connection: Connection, namespace: Namespace, events: Sequence[Event]) -> set[tuple[int, int]]:
    """Append these events; return the runs and tokens that were out of date, of which nothing was written."""
    values = {
        "run_ids": [event.run_id for event in events],
        "tokens": [event.token for event in events],
        "kinds": [event.kind for event in events],
        "data": [event.data for event in events],
    }
    rows = await (await connection.execute(namespace.sql(APPEND), values)).fetchall()
    return {(event.run_id, event.token) for event in events} - set(rows)


class Written(NamedTuple):
    """An event as it is read."""

    seq: int
    kind: str
    data: Any
    at: datetime


READ = """
SELECT seq, kind, data, at
FROM {schema}.run_events
WHERE run_id = %(run)s AND seq > %(after)s
ORDER BY seq
LIMIT %(most)s
"""


async def read(connection: Connection, namespace: Namespace, run: int, after: int, most: int) -> list[Written]:
    """Return what a run said after that number, in order."""
    values = {"run": run, "after": after, "most": most}
    rows = await (await connection.execute(namespace.sql(READ), values)).fetchall()
    return [Written(*row) for row in rows]
