"""The feed: every change of state of every run, numbered in one order that is the same at every instance.

Each statement that changes the state of runs inserts one row for all of them (`feed_insert_sql`), in its own
transaction. The row has no number yet, and no writer waits for another. Transactions commit in another order than they
begin in, so a number drawn at the insert would be skipped by a reader that has already seen a higher one. Readers give
the numbers afterwards, to the rows that are visible by then, one reader at a time (`Numbers`). A row that becomes
visible later gets a later number: a client that has seen number n has seen every change up to n.

A change that follows another change of the same run is made by a transaction that began after the other's commit.
Hence its row has the higher `id`, and no snapshot shows it without the other. Rows are therefore numbered in the order
of their ids, a bounded number of them in each transaction. A round of several transactions numbers no row above the
highest id that its first snapshot has shown: such a row may follow a change that this round has passed already.

No session ever waits for the feed's advisory lock. A reader that does not get it reads what has a number, and tries
again; another reader is giving numbers meanwhile.

    failure                                        effect
    a reader dies before its commit                no number was given; the next reader gives them
    it freezes in between, holding the lock        the server ends its session after `PATIENCE`; until then nothing is
                                                   numbered, and writers go on
    nobody reads                                   nothing is numbered; rows that are pruned unread leave one row that
                                                   takes their numbers, so that a client that comes back sees the gap

Rows are kept for `FEED_RETENTION`. The row with the highest number is kept beyond that, because the next number follows
from it. Not in the feed: what runs emit (`events.py`), and why they ended.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import psycopg
import pydantic_core

from app.fleet.db.namespace import Lock, Namespace, Statement
from app.fleet.db.pool import Connection
from app.fleet.runs.events import STATE

IDLE = psycopg.pq.TransactionStatus.IDLE

# How many rows one transaction numbers, and how many one deletes.
AT_ONCE = 1000
PRUNED_AT_ONCE = 250
# How many rows one statement reads, and how many changes in them, whichever comes first.
PAGE = 50
CHANGES = 5000
PATIENCE = 5.0
MARKS = 100
# The state of a row that stands for what was pruned before any reader had numbered it.
UNREAD = "unread"


def feed_insert_sql(changed: str, state: str = "state", seq: str = "events") -> str:
    """Return the statement that adds the changed runs of a CTE: `id`, `action_id`, `attempt`, `instance`, and these."""
    return f"""
    INSERT INTO {{schema}}.feed (state, instance, many, runs, actions, seqs, attempts)
    SELECT {state}, instance, count(*), array_agg(id), array_agg(action_id), array_agg({seq}), array_agg(attempt)
    FROM {changed}
    WHERE (SELECT kept > '0' FROM {{schema}}.feed_settings)
    GROUP BY 1, 2
    """


# The lock is taken by a statement of its own: the next statement's snapshot then has everything that the previous
# holder committed. A bitmap scan would read all rows without a number, where an index scan stops after `AT_ONCE`; the
# planner chooses it when its statistics are of a time at which every row had a number.
TURN = Statement(f"""
SELECT pg_try_advisory_xact_lock({{class}}, {Lock.FEED.key(0)}),
       (SELECT kept > '0' FROM {{schema}}.feed_settings),
       set_config('idle_in_transaction_session_timeout', '{PATIENCE * 1000:.0f}', true),
       set_config('enable_bitmapscan', 'off', true)
""")
LAST = "SELECT first + many - 1 FROM {schema}.feed WHERE first IS NOT NULL ORDER BY first DESC LIMIT 1"
LOOK = Statement(f"SELECT coalesce(({LAST}), 0)")
# A number for each change; a row has that of its first. `top` is the highest id that this snapshot shows, and is asked
# for only when there is more to number.
NUMBER = Statement(f"""
WITH last AS MATERIALIZED (
    SELECT coalesce(({LAST}), 0) AS number
), new AS MATERIALIZED (
    SELECT id, sum(many) OVER (ORDER BY id) - many AS before
    FROM (
        SELECT id, many
        FROM {{schema}}.feed
        WHERE first IS NULL AND id > %(after)s AND id <= %(top)s
        ORDER BY id
        LIMIT {AT_ONCE}
    ) AS n
), numbered AS (
    UPDATE {{schema}}.feed AS f
    SET first = (SELECT number FROM last) + 1 + n.before
    FROM new AS n
    WHERE f.id = n.id
    RETURNING f.id, f.many
)
SELECT (SELECT number FROM last) + coalesce(sum(many), 0)::int8, count(*), coalesce(max(id), 0),
       pg_snapshot_xmin(pg_current_snapshot())::text::int8, pg_snapshot_xmax(pg_current_snapshot())::text::int8,
       CASE WHEN count(*) = {AT_ONCE}
            THEN (SELECT id FROM {{schema}}.feed WHERE first IS NULL ORDER BY id DESC LIMIT 1) END
FROM numbered
""")

# From the row on that has the next number in it.
READ = Statement(f"""
SELECT first, many, at, state, instance, runs, actions, seqs, attempts
FROM (
    SELECT *, sum(cardinality(runs)) OVER (ORDER BY first) - cardinality(runs) AS before
    FROM (
        SELECT *
        FROM {{schema}}.feed
        WHERE first >= coalesce((SELECT max(first) FROM {{schema}}.feed WHERE first <= %(after)s + 1), 0)
          AND first + many > %(after)s + 1
        ORDER BY first
        LIMIT %(most)s
    ) AS page
) AS p
WHERE before < {CHANGES}
ORDER BY first
""")

# Without the lock: which rows may be pruned, from the lowest id on.
OLD = Statement(f"""
SELECT id, at < statement_timestamp() - (SELECT kept FROM {{schema}}.feed_settings),
       pg_snapshot_xmin(pg_current_snapshot())::text::int8, pg_snapshot_xmax(pg_current_snapshot())::text::int8
FROM {{schema}}.feed
WHERE id > %(after)s
ORDER BY id
LIMIT {PRUNED_AT_ONCE}
""")

# With the lock. The row with the highest number stays; while no row has a number, every row may go, for the one that
# stands for them has the first.
PRUNE = Statement(f"""
WITH gone AS (
    DELETE FROM {{schema}}.feed
    WHERE id = ANY (%(ids)s::int8[]) AND (first IS NULL OR first < (SELECT max(first) FROM {{schema}}.feed))
    RETURNING id, first, many
), unread AS (
    INSERT INTO {{schema}}.feed (first, state, many, runs, actions, seqs, attempts)
    SELECT coalesce(({LAST}), 0) + 1, '{UNREAD}', sum(many), '{{}}', '{{}}', '{{}}', '{{}}'
    FROM gone
    WHERE first IS NULL
    HAVING count(*) > 0
)
SELECT id FROM gone
""")
ALL = 2**63 - 1

NAMES = Statement("SELECT id, name FROM {schema}.actions")

KEEP = Statement("UPDATE {schema}.feed_settings SET kept = %(kept)s WHERE kept IS DISTINCT FROM %(kept)s")


class Change(NamedTuple):
    """One run's change of state."""

    number: int
    run_id: int
    action_id: int
    # The number it has among the run's own events.
    seq: int
    state: str
    attempt: int
    instance: str | None
    at: datetime

    def as_json(self, names: Mapping[int, str]) -> str:
        """Write it as an event of its run, with the action's name."""
        told = {
            "run": self.run_id,
            "action": names.get(self.action_id),
            "seq": self.seq,
            "kind": STATE,
            "data": {"state": self.state, "attempt": self.attempt, "instance": self.instance},
            "at": self.at,
        }
        return pydantic_core.to_json(told).decode()


# About how much memory a change takes in a row, and as the bytes that are sent to clients.
CHANGE_WEIGHT = 280


@dataclass(slots=True)
class Batch:
    """What one statement changed: a row of the feed."""

    first: int
    many: int
    at: datetime
    state: str
    instance: str | None
    runs: list[int]
    actions: list[int]
    seqs: list[int]
    attempts: list[int]
    # Each change as it is sent, made once for all clients by the first that needs it.
    encoded: list[bytes] | None = field(default=None, compare=False, repr=False)

    @property
    def seq(self) -> int:
        """The number of its last change."""
        return self.first + self.many - 1

    def missing(self, after: int) -> int:
        """Return up to which number nothing is kept any more, for a client that has seen everything up to `after`."""
        return self.seq if self.state == UNREAD else max(after, self.first - 1)

    @property
    def weight(self) -> int:
        return CHANGE_WEIGHT * (1 + len(self.runs))

    def after(self, number: int) -> list[Change]:
        return [
            Change(self.first + place, run_id, action_id, seq, self.state, attempt, self.instance, self.at)
            for place, (run_id, action_id, seq, attempt) in enumerate(
                zip(self.runs, self.actions, self.seqs, self.attempts, strict=True)
            )
            if self.first + place > number
        ]


class Mark(NamedTuple):
    """An id up to which everything visible was handled, and the transactions that could still add a row below it."""

    id: int
    # Every such transaction has an id below this one.
    horizon: int


class Floor:
    """The id up to which nothing is left and nothing can appear: where a scan begins.

    An index keeps the entries of rows that were updated or deleted until vacuum removes them, and a single open
    snapshot anywhere in the database delays that. A scan from the lowest id on would walk through all of them.

    A row may become visible late, below ids that were handled long ago. Its transaction had an id before it drew the
    row's id, because it had changed runs before. So once every transaction below a mark's horizon has ended, a scan
    from the floor on sees every row below the mark that there will ever be; when it has handled them, the floor rises.
    """

    def __init__(self) -> None:
        self.id = 0
        self._marks: deque[Mark] = deque()

    def reachable(self, oldest: int) -> int:
        """Return where the floor may rise to after a scan, given the lowest transaction id that is in progress."""
        return max((mark.id for mark in self._marks if mark.horizon <= oldest), default=self.id)

    def rise(self, to: int, mark: Mark | None) -> None:
        """End a scan that has committed what it did."""
        self.id = max(self.id, to)
        if mark is not None:
            # While one transaction stays open, marks would only become more.
            if len(self._marks) == MARKS:
                self._marks.pop()
            self._marks.append(mark)
        while self._marks and self._marks[0].id <= self.id:
            self._marks.popleft()


@dataclass
class Round:
    """A round of numbering that is not over: `after` was numbered, up to `top` there is more."""

    after: int
    top: int
    # Where the floor rises to when the round is over.
    floor: int


class Given(NamedTuple):
    """What a step of numbering found."""

    # The last number there is.
    number: int
    # Whether every row that was visible when the round began has its number now.
    complete: bool
    # Whether another session is giving numbers.
    busy: bool
    # Whether there is a feed at all.
    kept: bool


class Numbers:
    """Gives numbers. One reader of an instance uses it, and no two calls overlap."""

    def __init__(self) -> None:
        self._floor = Floor()
        self._round: Round | None = None

    @property
    def in_round(self) -> bool:
        """Whether the next step goes on with a round that began earlier."""
        return self._round is not None

    async def give(self, connection: Connection, namespace: Namespace) -> Given:
        """Number up to `AT_ONCE` rows in a transaction of its own. If another session is at it, number none."""
        assert connection.info.transaction_status is IDLE
        # Explicitly a transaction, whatever mode the connection is in: the lock must be held until the commit.
        async with connection.transaction():
            allowed, kept, *_ = await one(connection, namespace.sql(TURN))
            if not allowed:
                (last,) = await one(connection, namespace.sql(LOOK))
                return Given(last, complete=False, busy=True, kept=kept)
            begun = self._round
            values = {"after": begun.after if begun else self._floor.id, "top": begun.top if begun else ALL}
            last, count, highest, oldest, horizon, top = await one(connection, namespace.sql(NUMBER), values)
        # Only after the commit: an error leaves the floor and the round as they were.
        highest = max(highest, values["after"])
        top = begun.top if begun else top
        to = begun.floor if begun else self._floor.reachable(oldest)
        if count == AT_ONCE and highest < top:
            self._round = Round(highest, top, to)
        else:
            self._round = None
            self._floor.rise(to, Mark(highest, horizon) if highest > self._floor.id else None)
        return Given(last, complete=self._round is None, busy=False, kept=kept)


async def one(connection: Connection, statement: bytes, values: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
    row = await (await connection.execute(statement, values)).fetchone()
    assert row is not None
    return row


async def read(connection: Connection, namespace: Namespace, after: int, most: int = PAGE) -> Sequence[Batch]:
    """Return what was numbered after that, in order."""
    rows = await (await connection.execute(namespace.sql(READ), {"after": after, "most": most})).fetchall()
    return [Batch(*row) for row in rows]


async def names(connection: Connection, namespace: Namespace) -> dict[int, str]:
    """Return the names of all actions there ever were."""
    return dict(await (await connection.execute(namespace.sql(NAMES))).fetchall())


async def keep(connection: Connection, namespace: Namespace, kept: timedelta) -> None:
    """Say how long changes are kept, by all instances; not at all switches the feed off."""
    await connection.execute(namespace.sql(KEEP), {"kept": kept})


class Pruner:
    """Deletes the rows that were kept for long enough, a bounded number of them in each step."""

    def __init__(self) -> None:
        self._floor = Floor()
        self._after = 0
        # Where the floor rises to when this pass is over, the lowest row of the pass that had to stay, and which
        # transactions were in progress when its last rows were read.
        self._to = 0
        self._stays = ALL
        self._horizon = 0

    async def step(self, connection: Connection, namespace: Namespace) -> bool:
        """Look at some rows without the lock, delete the old ones with it; return whether there may be more."""
        rows = await (await connection.execute(namespace.sql(OLD), {"after": self._after})).fetchall()
        old, gone = [row[0] for row in rows if row[1]], set[int]()
        if self._after == self._floor.id and rows:
            self._to, self._stays = self._floor.reachable(rows[0][2]), ALL
        if rows:
            self._horizon = rows[0][3]
        if old:
            async with connection.transaction():
                allowed, *_ = await one(connection, namespace.sql(TURN))
                if not allowed:
                    return True
                gone = {
                    row[0] for row in await (await connection.execute(namespace.sql(PRUNE), {"ids": old})).fetchall()
                }
            self._after = old[-1]
        self._stays = min({self._stays, *(row[0] for row in rows)} - gone)
        if len(old) == PRUNED_AT_ONCE:
            return True
        mark = Mark(self._after, self._horizon) if self._after > self._floor.id else None
        self._floor.rise(min(self._to, self._stays - 1), mark)
        self._after = self._floor.id
        return False
