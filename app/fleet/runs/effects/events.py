"""Run events: the state changes of a run and what it emitted, numbered from 1 without gaps, the same at every instance.

    1   state      {"state": "pending", …}        the run was created
    2   state      {"state": "running", …}        an instance has claimed it
    3   progress   {"done": 0.5, …}               the run emitted it: `progress`, `log`, or a kind of the action
    …
    n   state      {"state": "succeeded", …}      the run has ended; or is `pending` again, and so on

The events that a run emits are appended in batches. Each batch is one statement. It first increases the event counter
in the run's row, and only if the row is running and still has the token. This fences the writer, and the lock on the
row prevents two batches from drawing the same number. A fenced attempt draws no number and writes no event; neither
does an attempt whose row another transaction has locked, until that transaction ends. The statement increases the
counter from the value that the attempt expects. If a batch is sent again because its response was lost, the counter has
another value, and the statement writes nothing.

A change of state draws its number from the same counter, in the statement that changes the state, so the events cannot
contradict the row. Most changes are never written as events: the row has what is needed to build the events for its
creation, its latest start and its end (`READ`). So a claim or a completion costs nothing more. Only a run that becomes
pending *again* loses what its row has about the previous attempt. The statement that makes it pending writes those
events (`event_insert_sql`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import pydantic_core

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.db.pool.statements import array
from app.fleet.runs.effects.states import is_running

STATE = "state"
PROGRESS = "progress"
LOG = "log"
# The last message of a stream; not an event of the run.
DONE = "done"
# Kinds that an action may not use.
RESERVED = (STATE, DONE)
# How many events of a run one statement reads, and about how many bytes of data, whichever comes first.
PAGE_EVENTS = 500
PAGE_BYTES = 262_144


class Event(NamedTuple):
    """An event to write."""

    run_id: int
    token: int
    kind: str
    # Valid JSON.
    data: str | None
    # How many events the run had before this batch. If given, a batch that is sent several times is written once.
    before: int | None = None

    @property
    def weight(self) -> int:
        return len(self.data or "")


# Events of a run are numbered in the order of the batch, in which they were emitted.
APPEND = Statement(f"""
WITH batch AS (
    SELECT *, row_number() OVER (PARTITION BY run_id ORDER BY ordinal) AS nth
    FROM unnest(%(run_ids)s::int8[], %(tokens)s::int8[], %(kinds)s::text[], %(data)s::text[], %(befores)s::int[])
         WITH ORDINALITY AS e (run_id, token, kind, data, before, ordinal)
), locked AS MATERIALIZED (
    SELECT r.id
    FROM {{schema}}.runs AS r
    WHERE r.id = ANY (%(run_ids)s::int8[]) AND {is_running()}
    FOR NO KEY UPDATE SKIP LOCKED
), counted AS (
    UPDATE {{schema}}.runs AS r
    SET events = r.events + g.added,
        progress = coalesce(g.progress::json, r.progress)
    FROM (
        SELECT run_id, token, count(*)::int AS added, min(before) AS before,
               (array_agg(data ORDER BY ordinal DESC) FILTER (WHERE kind = 'progress'))[1] AS progress
        FROM batch
        GROUP BY run_id, token
    ) AS g
    WHERE r.id = ANY (ARRAY(SELECT id FROM locked)) AND r.id = g.run_id AND r.token = g.token AND {is_running()}
      AND r.events = coalesce(g.before, r.events)
    RETURNING r.id, r.token, r.events - g.added AS before
), written AS (
    INSERT INTO {{schema}}.run_events (run_id, seq, kind, data)
    SELECT g.run_id, c.before + g.nth, g.kind, g.data::json
    FROM batch AS g
    JOIN counted AS c ON c.id = g.run_id AND c.token = g.token
)
SELECT id, token FROM counted
""")


def utc(instant: str) -> str:
    """Return the expression that formats an instant as the REST API does, in any session time zone."""
    return f"""to_char({instant} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""


# The columns that `event_insert_sql` needs of a run, after the statement has added one to the run's event counter.
EVENT_COLUMNS = "r.id, r.events, r.running_seq, r.started_at, r.instance, r.attempt, r.run_at"


def event_insert_sql(runs: str) -> str:
    """Return the INSERT of two events for each run in a CTE: the start of its attempt, and that it is pending again.

    The CTE has the columns `EVENT_COLUMNS`, `ran` (the number of the attempt that ended) and `why` (why it ended).
    """
    return f"""
    INSERT INTO {{schema}}.run_events (run_id, seq, kind, data, at)
    SELECT b.id, s.seq, '{STATE}', s.data, s.at
    FROM {runs} AS b, LATERAL (VALUES
        (b.running_seq, json_build_object('state', 'running', 'attempt', b.ran, 'instance', b.instance), b.started_at),
        (b.events, json_build_object('state', 'pending', 'attempt', b.attempt, 'instance', b.instance,
                                     'run_at', {utc("b.run_at")}, 'error', b.why), clock_timestamp())
    ) AS s (seq, data, at)
    WHERE s.seq IS NOT NULL
    """


def ended_event_insert_sql(runs: str) -> str:
    """Return the INSERT of events for finished runs that are retried: the start of the last attempt, its end, and that
    the run is pending again.

    The CTE has rows of `finished_runs`. Events that `event_insert_sql` has already written stay unchanged.
    """
    return f"""
    INSERT INTO {{schema}}.run_events (run_id, seq, kind, data, at)
    SELECT b.id, s.seq, '{STATE}', s.data, s.at
    FROM {runs} AS b, LATERAL (VALUES
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
    """Append these events; return the pairs of run and token whose events were refused."""
    values = {
        "run_ids": array([event.run_id for event in events]),
        "tokens": array([event.token for event in events]),
        "kinds": [event.kind for event in events],
        "data": [event.data for event in events],
        "befores": array([event.before for event in events]),
    }
    rows = await (await connection.execute(namespace.sql(APPEND), values)).fetchall()
    return {(event.run_id, event.token) for event in events} - set(rows)


# About how many bytes of memory an event takes, without its data.
EVENT_WEIGHT = 300


@dataclass(slots=True)
class StoredEvent:
    """An event of a run, read from the database."""

    seq: int
    kind: str
    # JSON; most readers forward it unchanged.
    text: str | None
    at: datetime
    # The event as it is sent; the first client that needs it encodes it for all.
    encoded: bytes | None = field(default=None, compare=False, repr=False)

    @property
    def data(self) -> Any:
        return None if self.text is None else json.loads(self.text)

    @property
    def weight(self) -> int:
        """About how many bytes of memory it takes, including its encoded form."""
        return EVENT_WEIGHT + 2 * len(self.text or "")

    def as_json(self, run_id: int) -> str:
        kind, at = (pydantic_core.to_json(value).decode() for value in (self.kind, self.at))
        return f'{{"run":{run_id},"seq":{self.seq},"kind":{kind},"data":{self.text or "null"},"at":{at}}}'


class EventPage(NamedTuple):
    """The next events of a run, in order."""

    run_id: int
    action_id: int
    # How many events the run has in all, and whether it has ended.
    total: int
    ended: bool
    events: list[StoredEvent]


# One statement has one snapshot: a run that is moving to `finished_runs` is in exactly one of the two tables. Three
# branches build events from the row; `run_events` has the emitted events and the events of earlier attempts. A page of
# a run ends when it would exceed `PAGE_BYTES`; the caller ignores events behind the gap, and the next page has them. A
# run that is being pruned (`engine/maintenance/pruner.py`) is left out: some of its events may be deleted.
READ = Statement(f"""
WITH requested AS MATERIALIZED (
    SELECT * FROM unnest(%(runs)s::int8[], %(afters)s::int[]) AS w (id, after)
), found AS MATERIALIZED (
    SELECT w.after, r.id, r.action_id, r.events, false AS ended, r.state, r.attempt, r.instance, r.running_seq,
           r.trigger, r.scheduled_for, r.created_at, r.started_at, NULL::timestamptz AS finished_at,
           NULL::json AS result, r.error
    FROM requested AS w
    JOIN {{schema}}.runs AS r ON r.id = w.id
    UNION ALL
    SELECT w.after, r.id, r.action_id, r.events, true, r.state, r.attempt, r.instance, r.running_seq,
           r.trigger, r.scheduled_for, r.created_at, r.started_at, r.finished_at,
           r.result, r.error
    FROM requested AS w
    JOIN {{schema}}.finished_runs AS r ON r.id = w.id AND r.expires_at > 'epoch'
), page AS (
    SELECT e.run_id, e.seq, e.kind, e.data, e.at
    FROM found AS k, LATERAL (
        SELECT *, sum(octet_length(data::text)) OVER (ORDER BY seq) - octet_length(data::text) AS before
        FROM {{schema}}.run_events
        WHERE run_id = k.id AND seq > k.after AND seq <= k.after + %(limit)s
    ) AS e
    WHERE coalesce(e.before, 0) < %(max_bytes)s
    UNION ALL
    SELECT id, 1, 'state', json_build_object('state', 'pending', 'attempt', 0, 'instance', NULL, 'trigger', trigger,
                                             'scheduled_for', {utc("scheduled_for")}), created_at
    FROM found
    WHERE after < 1
    UNION ALL
    SELECT id, running_seq, 'state', json_build_object('state', 'running', 'attempt', attempt, 'instance', instance),
           started_at
    FROM found AS k
    WHERE running_seq > after AND running_seq <= after + %(limit)s AND (ended OR {is_running("k")})
      AND NOT EXISTS (SELECT FROM {{schema}}.run_events AS e WHERE e.run_id = k.id AND e.seq = k.running_seq)
    UNION ALL
    SELECT id, events, 'state', json_build_object('state', state, 'attempt', attempt, 'instance', instance,
                                                  'result', result, 'error', error), finished_at
    FROM found
    WHERE ended AND events > after AND events <= after + %(limit)s
)
SELECT id, action_id, events, ended, NULL::int, NULL::text, NULL::text, NULL::timestamptz FROM found
UNION ALL
SELECT run_id, 0, 0, false, seq, kind, data::text, at FROM page
ORDER BY 1, 5 NULLS FIRST
""")


async def read_pages(
    connection: Connection, namespace: Namespace, afters: Mapping[int, int], limit: int = PAGE_EVENTS
) -> dict[int, EventPage]:
    """Return the next events of these runs, after these numbers. Runs that do not exist (any more) are left out."""
    values = {"runs": array(afters), "afters": array(afters.values()), "limit": limit, "max_bytes": PAGE_BYTES}
    pages: dict[int, EventPage] = {}
    rows = await (await connection.execute(namespace.sql(READ), values)).fetchall()
    for run_id, action_id, total, ended, seq, kind, text, at in rows:
        if seq is None:
            pages[run_id] = EventPage(run_id, action_id, total, ended, [])
        elif seq == afters[run_id] + len(pages[run_id].events) + 1:
            pages[run_id].events.append(StoredEvent(seq, kind, text, at))
    return pages
