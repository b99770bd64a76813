"""Lines: the runs of one action with the same `ordering_key`, which run one after another, in the order of their ids.

A line is nothing but its rows. Its head is the lowest id of all its runs that have not ended, whatever state that is
in. A run may be claimed if it is the head of its line, is pending and due, and nothing of its line is running. So a
head that waits for its retry, that is for later, or whose instance has died, holds its line; and when it has ended, the
next one is the head, without anybody having to say so. What there is to be claimed is a function of the rows, and
cannot get lost with a process.

That of two runs of a line never both run is held by an index, and not by the look: `runs_lines_running` is unique over
what is running. A look may be out of date, when a lower id becomes visible late (its transaction began earlier and
committed later), or when an operator has an old run tried again. Then two claims take two runs, the second waits for
the first one's commit, is refused, and looks again.

Cost goes by the number of lines, not by how long they are: a claim steps from head to head through the index
(`runs_lines`), `LOOKS` of them at most, and goes on behind the last line it came to, in a ring, so that none starves.
Where a run has just ended here, the line is known, and is asked for by its key, without a step through the others. A
look that has come past many lines rests for as long as they are many (`REST`), so that thousands which all wait for a
retry cost no more for every run that is triggered in another.

Runs of lines wait at places of their own, apart from the other runs of their action: their `priority` is stored less
`APART`. So a claim of other runs never walks through a line, however long it is, and the same notifications and looks
that tell of places tell of lines. What priority they were given decides nothing; lines are claimed at their action's.

    failure                                      what happens
    the instance dies with a run of a line       the line waits until it is taken back, and then for that run
    the claim's answer is lost                   the same: the run is put back (`maintenance/reconciler.py`)
    a notification is lost                       the reconciler sees that runs of lines wait, two seconds later
    the head is locked by somebody               the line is left alone, and found by the next look
    a look was out of date                       refused by the unique index; looked at again after `AGAIN`

What it does not promise: an order between transactions that were open at the same time, except that of their becoming
visible. And an index keeps what has left until vacuum removes it: under a snapshot that is held for long, a step to a
head meets what has left that line since.

Lock order: as of every claim. Two claims that were out of date about the same two lines may wait for each other; the
server ends one of them, and it looks again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from app.fleet.cluster.registry import Identity
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Connection
from app.fleet.runs.claim import KEY, ME, PICKED, WEIGHT, Row, row, taken
from app.fleet.runs.states import is_pending

# More than priorities can differ.
APART = 10_000
# The place of all lines of an action.
LINES = -APART
# How many lines a claim looks at.
LOOKS = 1000
# How soon after a claim that was out of date.
AGAIN = 0.01
# After as many looks as `LOOKS`, before the next; less after fewer, and not at all where there was more than room for.
REST = 0.02


def apart(priority: int, ordering_key: str | None) -> int:
    """Return what is stored as the priority of a run."""
    return priority if ordering_key is None else priority - APART


def place_of(priority: int) -> int:
    """Return which place that is, of its action: all lines are one."""
    return LINES if priority < LINES // 2 else priority


# Of a head `h`: whether it may be claimed, and when, if it is for later.
JUDGED = """
        CASE
            WHEN h.state = 'pending' AND h.run_at <= statement_timestamp() THEN (
                SELECT true
                FROM {schema}.runs AS o
                WHERE o.action_id = %(action)s::int AND o.ordering_key = h.ordering_key AND o.state = 'running'
                LIMIT 1
            ) IS NULL
            ELSE false
        END AS free,
        CASE WHEN h.state = 'pending' AND h.run_at > statement_timestamp() THEN h.run_at END AS later"""

# `line` begins with where we are and steps to the next line each time: up to the last one, and then from the first one
# to where the round began. `ended` are lines that are asked for by their keys. A head that is locked is left to who has
# it; one that has moved meanwhile is judged again. `is_pending` does not lead into the index of what is pending.
CLAIM = Statement(f"""
WITH RECURSIVE {ME}, open AS MATERIALIZED (
    SELECT a.id
    FROM me, {{schema}}.actions AS a
    WHERE a.id = %(action)s::int AND a.paused_at IS NULL
      AND (%(counted)s OR (a.concurrency IS NULL AND a.rate_interval IS NULL))
), line AS (
    SELECT %(after)s::text COLLATE "C" AS key, %(wrapped)s::bool AS wrapped, 0 AS looked, 0 AS found,
           NULL::int8 AS head, NULL::timestamptz AS later
    FROM open
    UNION ALL
    SELECT n.ordering_key, n.wrapped, l.looked + 1, l.found + n.free::int, CASE WHEN n.free THEN n.id END, n.later
    FROM line AS l, LATERAL (
        SELECT h.id, h.ordering_key, h.wrapped, {JUDGED}
        FROM (
            (
                SELECT *
                FROM (
                    SELECT id, ordering_key, state, run_at, l.wrapped
                    FROM {{schema}}.runs
                    WHERE action_id = %(action)s::int AND ordering_key > l.key
                    ORDER BY ordering_key, id
                    LIMIT 1
                ) AS next
                WHERE NOT l.wrapped OR ordering_key <= %(start)s::text
            )
            UNION ALL
            (
                SELECT id, ordering_key, state, run_at, true
                FROM {{schema}}.runs
                WHERE NOT l.wrapped AND action_id = %(action)s::int AND ordering_key <= %(start)s::text
                ORDER BY ordering_key, id
                LIMIT 1
            )
            LIMIT 1
        ) AS h
    ) AS n
    WHERE l.looked < %(looks)s AND l.found < %(most)s
), ended AS MATERIALIZED (
    SELECT h.id, {JUDGED}
    FROM open, unnest(%(keys)s::text[]) AS k (key), LATERAL (
        SELECT id, ordering_key, state, run_at
        FROM {{schema}}.runs
        WHERE action_id = %(action)s::int AND ordering_key = k.key
        ORDER BY id
        LIMIT 1
    ) AS h
), heads AS (
    SELECT head, later FROM line
    UNION ALL
    -- Not one that was met as well: it would take the room of two.
    SELECT CASE WHEN free THEN id END, later FROM ended WHERE id NOT IN (SELECT head FROM line WHERE head IS NOT NULL)
), found AS MATERIALIZED (
    SELECT r.id, r.weight
    FROM heads AS h, LATERAL (
        SELECT id, {WEIGHT} AS weight
        FROM {{schema}}.runs
        WHERE id = h.head AND {is_pending("runs")} AND run_at <= statement_timestamp()
        FOR UPDATE SKIP LOCKED
    ) AS r
    LIMIT %(most)s
), {PICKED}, {taken("%(timeout)s::float8")}
SELECT came.*, c.*
FROM (
    SELECT key, wrapped, looked, found, (SELECT min(later) FROM heads) AS later, (SELECT many FROM total) AS ready
    FROM line
    ORDER BY looked DESC
    LIMIT 1
) AS came
LEFT JOIN (SELECT {row(f"priority + {APART}")} FROM claimed) AS c ON true
""")
# How many columns stand before those of a run.
CAME = 6


@dataclass
class ScanCursor:
    """Where the looks at an action's lines are: they go round, from line to line, by their keys."""

    # The line that was looked at last; none has an empty key.
    after: str = ""
    # Where the present round began, and whether it has come past the last line since.
    start: str = ""
    wrapped: bool = False
    # The earliest that a head is for, of those that were met in this round.
    later: datetime | None = None
    # Until when it rests, on the event loop's clock. Lines that are asked for do not wait for that.
    rests_until: float = 0.0
    # Lines in which a run has ended here.
    ended: dict[str, None] = field(default_factory=dict)

    def begin(self) -> None:
        """Go round once more, from here: any line may have something by now."""
        self.start, self.wrapped, self.later = self.after, False, None

    def ask(self, keys: Iterable[str]) -> None:
        """Look at these lines, wherever the round is."""
        self.ended.update(dict.fromkeys(keys))


class Found(NamedTuple):
    """What a claim has found in the lines of an action."""

    rows: list[Row]
    # The round is complete.
    complete: bool
    # How long to rest before going on.
    rest: float
    # The earliest that a head is for.
    later: datetime | None


async def claim(
    connection: Connection,
    namespace: Namespace,
    me: Identity,
    ring: ScanCursor,
    *,
    action: int,
    timeout: float,
    looks: int,
    most: int,
    counted: bool,
) -> Found | None:
    """Take heads of an action's lines; None if the action is paused, or limited and not `counted`.

    Raises UniqueViolation if what it saw was out of date. Nothing is taken then.
    """
    asked = [ring.ended.popitem()[0] for _ in range(min(len(ring.ended), LOOKS))]
    values = {
        "me": me.id,
        "name": me.name,
        "action": action,
        "timeout": timeout,
        "counted": counted,
        "after": ring.after,
        "wrapped": ring.wrapped,
        "start": ring.start,
        "looks": looks,
        "most": most,
        "keys": asked,
    }
    try:
        async with connection.cursor(binary=True) as cursor:
            await cursor.execute(namespace.sql(CLAIM), values)
            rows = await cursor.fetchall()
    except BaseException:
        ring.ask(asked)
        raise
    if not rows:
        return None
    after, wrapped, looked, found, later, ready = rows[0][:CAME]
    claimed = [each[CAME:] for each in rows if each[CAME] is not None]
    if ready > len(claimed):
        # They were too heavy for one claim: the next one looks at the same lines.
        ring.ask(asked)
        return Found(claimed, complete=False, rest=0.0, later=None)
    ring.after, ring.wrapped = after, wrapped
    if len(claimed) == most:
        # There was no room for all.
        ring.ask(set(asked).difference([each[KEY] for each in claimed]))
    ring.later = min(filter(None, (ring.later, later)), default=None)
    return Found(claimed, looked < looks and found < most, REST * looked / LOOKS if found < most else 0.0, ring.later)
