"""Run events: what became of a run and what it emitted, numbered from 1 without gaps, the same at every instance.

    1   state      {"state": "pending", …}        it was made
    2   state      {"state": "running", …}        an instance has claimed it
    3   progress   {"done": 0.5, …}               what it emitted: `progress`, `log`, or a kind of its own
    …
    n   state      {"state": "succeeded", …}      it ended; or `pending` again, and so on

What a run emits is appended in batches. Each batch is one statement, which first moves the counter in the run's own
row, and only if the run still carries the token. That is the fence, and the lock on the row keeps two batches from
drawing the same number. A fenced run draws no number, and none of its events is written; nor does a run whose row
another transaction has locked, until that transaction ends. The statement moves the counter from the value that the
attempt knows; a batch that is sent again, because its answer was lost, finds the counter moved and writes nothing.

Changes of state draw their numbers from the same counter, in the statement that changes the state, so the events cannot
disagree with the row. Most of them are never written: that a run was made, began and ended is in its own row, and is
read from there (`READ`). A claim or a completion costs nothing for being an event. Only a run that becomes pending
*again* is about to lose what its row has of the attempt before; the statement that puts it back writes that
(`event_insert_sql`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import pydantic_core

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Connection
from app.fleet.db.statements import array
from app.fleet.runs.states import is_running

STATE = "state"
PROGRESS = "progress"
LOG = "log"
# The last message of a stream; it is not an event of the run.
DONE = "done"
# Kinds that an action may not use.
RESERVED = (STATE, DONE)


class Event(NamedTuple):
    """An event that is to be written."""

    run_id: int
    token: int
    kind: str
    # JSON, checked already.
    data: str | None
    # How many events the run had before this batch, if known: then the batch is written once, however often it is sent.
    before: int | None = None

    @property
    def weight(self) -> int:
        return len(self.data or "")


# The order within the batch is the order in which they were emitted.
APPEND = Statement(f"""
WITH given AS (
    SELECT *, row_number() OVER (PARTITION BY run_id ORDER BY place) AS nth
    FROM unnest(%(run_ids)s::int8[], %(tokens)s::int8[], %(kinds)s::text[], %(data)s::text[], %(befores)s::int[])
         WITH ORDINALITY AS e (run_id, token, kind, data, before, place)
), own AS MATERIALIZED (
    SELECT r.id
    FROM {{schema}}.runs AS r
    WHERE r.id = ANY (%(run_ids)s::int8[]) AND {is_running()}
    FOR NO KEY UPDATE SKIP LOCKED
), counted AS (
    UPDATE {{schema}}.runs AS r
    SET events = r.events + g.many,
        progress = coalesce(g.progress::json, r.progress)
    FROM (
        SELECT run_id, token, count(*)::int AS many, min(before) AS before,
               (array_agg(data ORDER BY place DESC) FILTER (WHERE kind = 'progress'))[1] AS progress
        FROM given
        GROUP BY run_id, token
    ) AS g
    WHERE r.id = ANY (ARRAY(SELECT id FROM own)) AND r.id = g.run_id AND r.token = g.token AND {is_running()}
      AND r.events = coalesce(g.before, r.events)
    RETURNING r.id, r.token, r.events - g.many AS before
), written AS (
    INSERT INTO {{schema}}.run_events (run_id, seq, kind, data)
    SELECT g.run_id, c.before + g.nth, g.kind, g.data::json
    FROM given AS g
    JOIN counted AS c ON c.id = g.run_id AND c.token = g.token
)
SELECT id, token FROM counted
""")


def utc(instant: str) -> str:
    """Return what writes an instant as the REST API does, whatever the time zone of the session is."""
    return f"""to_char({instant} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""


# What `event_insert_sql` needs of a run that waits again, beside `ran` and `why`. Its counter has been moved by one.
KEPT = "r.id, r.events, r.running_seq, r.started_at, r.instance, r.attempt, r.run_at"


def event_insert_sql(back: str) -> str:
    """Return the statement that writes that the runs of a CTE had begun, and that they are pending again.

    The CTE has the columns `KEPT`, `ran` (the number of the attempt that is over), and `why` it is over.
    """
    return f"""
    INSERT INTO {{schema}}.run_events (run_id, seq, kind, data, at)
    SELECT b.id, s.seq, '{STATE}', s.data, s.at
    FROM {back} AS b, LATERAL (VALUES
        (b.running_seq, json_build_object('state', 'running', 'attempt', b.ran, 'instance', b.instance), b.started_at),
        (b.events, json_build_object('state', 'pending', 'attempt', b.attempt, 'instance', b.instance,
                                     'run_at', {utc("b.run_at")}, 'error', b.why), clock_timestamp())
    ) AS s (seq, data, at)
    WHERE s.seq IS NOT NULL
    """


def ended_event_insert_sql(back: str) -> str:
    """Return the statement that writes that runs of a CTE, rows of `finished_runs`, had ended and are pending again.

    Events of an attempt that `event_insert_sql` has written already are left as they are.
    """
    return f"""
    INSERT INTO {{schema}}.run_events (run_id, seq, kind, data, at)
    SELECT b.id, s.seq, '{STATE}', s.data, s.at
    FROM {back} AS b, LATERAL (VALUES
        (b.running_seq, json_build_object('state', 'running', 'attempt', b.attempt, 'instance', b.instance),
         b.started_at),
        (b.events, json_build_object('state', b.state, 'attempt', b.attempt, 'instance', b.instance,
                                     'result', b.result, 'error', b.error), b.finished_at),
        (b.events + 1, json_build_object('state', 'pending', 'attempt', 0, 'instance', b.instance,
                                         'error', 'tried again on request'), clock_timestamp())
    ) AS s (seq, data, at)
    WHERE s.seq IS NOT NULL
    ON CONFLICT DO NOTHING
    """


async def append(connection: Connection, namespace: Namespace, events: Sequence[Event]) -> set[tuple[int, int]]:
    """Append these events; return the runs and tokens that were out of date, for which nothing was written."""
    values = {
        "run_ids": array([event.run_id for event in events]),
        "tokens": array([event.token for event in events]),
        "kinds": [event.kind for event in events],
        "data": [event.data for event in events],
        "befores": array([event.before for event in events]),
    }
    rows = await (await connection.execute(namespace.sql(APPEND), values)).fetchall()
    return {(event.run_id, event.token) for event in events} - set(rows)


# About how much memory an event takes beside its data.
EVENT_WEIGHT = 300


@dataclass(slots=True)
class StoredEvent:
    """An event as it is read."""

    seq: int
    kind: str
    # As JSON, which nearly every reader passes on as it is.
    text: str | None
    at: datetime
    # As it is sent, made once for all clients by the first that needs it.
    encoded: bytes | None = field(default=None, compare=False, repr=False)

    @property
    def data(self) -> Any:
        return None if self.text is None else json.loads(self.text)

    @property
    def weight(self) -> int:
        """About how many bytes it takes, as it is read and as it is sent."""
        return EVENT_WEIGHT + 2 * len(self.text or "")

    def as_json(self, run_id: int) -> str:
        kind, at = (pydantic_core.to_json(value).decode() for value in (self.kind, self.at))
        return f'{{"run":{run_id},"seq":{self.seq},"kind":{kind},"data":{self.text or "null"},"at":{at}}}'


class EventPage(NamedTuple):
    """What is new of a run: some of its events, in order, and whether there are more."""

    run_id: int
    action_id: int
    # How many events it has by now, and whether the last of them is its end.
    total: int
    ended: bool
    events: list[StoredEvent]


# One statement, so one moment: a run that is moving to `finished_runs` is in one of them, never in both or none. What
# stands in the row is made into the events it stands for; of a run that began again, `run_events` has the earlier ones.
# A page of a run ends where it would get too heavy; what lies behind the gap is left for the next. A run that is being
# pruned (`engine/maintenance/pruner.py`) is not there any more: some of its events may be gone.
READ = Statement(f"""
WITH wanted AS MATERIALIZED (
    SELECT * FROM unnest(%(runs)s::int8[], %(afters)s::int[]) AS w (id, after)
), known AS MATERIALIZED (
    SELECT w.after, r.id, r.action_id, r.events, false AS ended, r.state, r.attempt, r.instance, r.running_seq,
           r.trigger, r.scheduled_for, r.created_at, r.started_at, NULL::timestamptz AS finished_at,
           NULL::json AS result, r.error
    FROM wanted AS w
    JOIN {{schema}}.runs AS r ON r.id = w.id
    UNION ALL
    SELECT w.after, r.id, r.action_id, r.events, true, r.state, r.attempt, r.instance, r.running_seq,
           r.trigger, r.scheduled_for, r.created_at, r.started_at, r.finished_at,
           r.result, r.error
    FROM wanted AS w
    JOIN {{schema}}.finished_runs AS r ON r.id = w.id AND r.expires_at > 'epoch'
), told AS (
    SELECT e.run_id, e.seq, e.kind, e.data, e.at
    FROM known AS k, LATERAL (
        SELECT *, sum(octet_length(data::text)) OVER (ORDER BY seq) - octet_length(data::text) AS before
        FROM {{schema}}.run_events
        WHERE run_id = k.id AND seq > k.after AND seq <= k.after + %(most)s
    ) AS e
    WHERE coalesce(e.before, 0) < %(heavy)s
    UNION ALL
    SELECT id, 1, 'state', json_build_object('state', 'pending', 'attempt', 0, 'instance', NULL, 'trigger', trigger,
                                             'scheduled_for', {utc("scheduled_for")}), created_at
    FROM known
    WHERE after < 1
    UNION ALL
    SELECT id, running_seq, 'state', json_build_object('state', 'running', 'attempt', attempt, 'instance', instance),
           started_at
    FROM known AS k
    WHERE running_seq > after AND running_seq <= after + %(most)s AND (ended OR {is_running("k")})
      AND NOT EXISTS (SELECT FROM {{schema}}.run_events AS e WHERE e.run_id = k.id AND e.seq = k.running_seq)
    UNION ALL
    SELECT id, events, 'state', json_build_object('state', state, 'attempt', attempt, 'instance', instance,
                                                  'result', result, 'error', error), finished_at
    FROM known
    WHERE ended AND events > after AND events <= after + %(most)s
)
SELECT id, action_id, events, ended, NULL::int, NULL::text, NULL::text, NULL::timestamptz FROM known
UNION ALL
SELECT run_id, 0, 0, false, seq, kind, data::text, at FROM told
ORDER BY 1, 5 NULLS FIRST
""")
MOST = 500
HEAVY = 262_144


async def read_all(
    connection: Connection, namespace: Namespace, afters: Mapping[int, int], most: int = MOST
) -> dict[int, EventPage]:
    """Return what is new of these runs after these numbers; a run that there is not (any more) is left out."""
    values = {"runs": array(afters), "afters": array(afters.values()), "most": most, "heavy": HEAVY}
    chapters: dict[int, EventPage] = {}
    rows = await (await connection.execute(namespace.sql(READ), values)).fetchall()
    for run_id, action_id, total, ended, seq, kind, text, at in rows:
        if seq is None:
            chapters[run_id] = EventPage(run_id, action_id, total, ended, [])
        elif seq == afters[run_id] + len(chapters[run_id].events) + 1:
            chapters[run_id].events.append(StoredEvent(seq, kind, text, at))
    return chapters
