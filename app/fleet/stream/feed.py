"""The feed: every change of state of every run, numbered in one order that is the same for everyone.

Each statement that changes the state of runs adds one row for all of them (`noted`), in its own transaction. What such
a row costs is little, and nobody waits for anybody: it has no number yet. Transactions commit in another order than
they began in, so a number drawn at the insert would be skipped by a reader who has already seen a higher one. Numbers
are given afterwards, by whoever reads the feed, to the rows that are there by then, one reader at a time (`Numbers`). A
row that becomes visible later gets a later number, and whoever has seen number n has seen all there is up to n.

A change of a run that follows another is in a transaction that began after the other's commit, so the order of rows
(`id`) among those that are numbered together has it later too.

    failure                                    what happens
    the reader dies before its commit          nothing is numbered, and the next reader does it
    it freezes in between, holding the lock    the server ends its session after `PATIENCE`; others wait for that long
    nobody reads                               nothing is numbered; what is forgotten unread leaves a row that says how
                                               much it was, so that its numbers are missing for who comes back

Rows are kept for `FEED_RETENTION`, and forgotten then; who comes with an older number is told what they missed. What is
not in the feed: what runs say (`events.py`), and why they ended.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import pydantic_core

from app.fleet.db.namespace import Lock, Namespace
from app.fleet.db.pool import Connection
from app.fleet.stream.events import STATE

# How many rows are numbered, and read, at once.
AT_ONCE = 1000
PAGE = 50
PATIENCE = 5.0
MARKS = 100
# The state of a row that stands for what was forgotten before anybody had read it.
UNREAD = "unread"


def noted(changed: str, state: str = "state", seq: str = "events") -> str:
    """Return the statement that adds the changed runs of a CTE: `id`, `action_id`, `attempt`, `instance`, and these."""
    return f"""
    INSERT INTO {{schema}}.feed (state, instance, many, runs, actions, seqs, attempts)
    SELECT {state}, instance, count(*), array_agg(id), array_agg(action_id), array_agg({seq}), array_agg(attempt)
    FROM {changed}
    WHERE (SELECT kept > '0' FROM {{schema}}.feed_settings)
    GROUP BY 1, 2
    """


# A number for each change; a row knows that of its first. The lock is taken by a statement before this one, so that
# this one sees what the holder before us has committed.
TURN = f"""
SELECT set_config('idle_in_transaction_session_timeout', '{PATIENCE * 1000:.0f}', true),
       pg_advisory_xact_lock({{class}}, {Lock.FEED.key(0)})
"""
LAST = "SELECT first + many - 1 FROM {schema}.feed WHERE first IS NOT NULL ORDER BY first DESC LIMIT 1"
LOOK = f"SELECT coalesce(({LAST}), 0), pg_snapshot_xmin(pg_current_snapshot())::text::int8"
NUMBER = f"""
WITH new AS MATERIALIZED (
    SELECT id, %(last)s + 1 + sum(many) OVER (ORDER BY id) - many AS first
    FROM (
        SELECT id, many
        FROM {{schema}}.feed
        WHERE first IS NULL AND id > %(floor)s
        ORDER BY id
        LIMIT {AT_ONCE}
    ) AS n
), numbered AS (
    UPDATE {{schema}}.feed AS f SET first = n.first FROM new AS n WHERE f.id = n.id RETURNING f.id, f.many
)
SELECT count(*), sum(many)::int8, max(id), (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8) FROM numbered
"""

# From the row on that has the next number in it.
READ = """
SELECT first, many, at, state, instance, runs, actions, seqs, attempts
FROM {schema}.feed
WHERE first >= coalesce((SELECT max(first) FROM {schema}.feed WHERE first <= %(after)s + 1), 0)
  AND first + many > %(after)s + 1
ORDER BY first
LIMIT %(most)s
"""

CUTOFF = """
SELECT id
FROM {schema}.feed
WHERE at >= statement_timestamp() - (SELECT kept FROM {schema}.feed_settings)
ORDER BY id
LIMIT 1
"""

# The last row that has a number stays: the next number is known from it.
FORGET = f"""
WITH old AS MATERIALIZED (
    SELECT id FROM {{schema}}.feed WHERE id > %(floor)s AND id < %(cutoff)s ORDER BY id LIMIT {AT_ONCE}
), gone AS (
    DELETE FROM {{schema}}.feed
    WHERE id = ANY (ARRAY(SELECT id FROM old)) AND first IS DISTINCT FROM (SELECT max(first) FROM {{schema}}.feed)
    RETURNING first, many
), unread AS (
    INSERT INTO {{schema}}.feed (first, state, many, runs, actions, seqs, attempts)
    SELECT coalesce(({LAST}), 0) + 1, '{UNREAD}', sum(many), '{{}}', '{{}}', '{{}}', '{{}}'
    FROM gone
    WHERE first IS NULL
    HAVING count(*) > 0
)
SELECT count(*), max(id) FROM old
"""
ALL = 2**63 - 1

NAMES = "SELECT id, name FROM {schema}.actions"

IS_KEPT = "SELECT kept > '0' FROM {schema}.feed_settings"
KEEP = "UPDATE {schema}.feed_settings SET kept = %(kept)s WHERE kept IS DISTINCT FROM %(kept)s"


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


class Batch(NamedTuple):
    """What one statement changed."""

    first: int
    many: int
    at: datetime
    state: str
    instance: str | None
    runs: list[int]
    actions: list[int]
    seqs: list[int]
    attempts: list[int]

    @property
    def seq(self) -> int:
        """The number of its last change."""
        return self.first + self.many - 1

    def missing(self, after: int) -> int:
        """Up to which number nothing is here any more, for somebody who has come to `after`."""
        return self.seq if self.state == UNREAD else max(after, self.first - 1)

    @property
    def weight(self) -> int:
        return 40 * len(self.runs)

    def after(self, number: int) -> list[Change]:
        return [
            Change(self.first + place, run_id, action_id, seq, self.state, attempt, self.instance, self.at)
            for place, (run_id, action_id, seq, attempt) in enumerate(
                zip(self.runs, self.actions, self.seqs, self.attempts, strict=True)
            )
            if self.first + place > number
        ]


class Mark(NamedTuple):
    """The highest id that was given its number, and the transactions that may have had a lower one just then."""

    id: int
    # All whose own id is below this.
    horizon: int


class Look(NamedTuple):
    """What a look at the rows without a number has found out, if its transaction was committed."""

    # The last number there was after it.
    number: int
    # Below this id, everything has its number, and nothing more can appear.
    floor: int
    mark: Mark | None


class Numbers:
    """Gives numbers, for one who reads.

    The index of rows without a number keeps the entries of those that got one until vacuum removes them, which a single
    open snapshot anywhere in the database delays. So it is read from a floor. Every transaction that may have added a
    row below it had ended before a look that found no such row any more. (Whoever adds a row has changed runs before,
    in the same statement, and is known as a transaction before it draws the row's id.)
    """

    def __init__(self) -> None:
        self._floor = 0
        self._marks: deque[Mark] = deque()
        self._latest: Look | None = None

    async def give(self, connection: Connection, namespace: Namespace) -> int:
        """Number what has no number yet, in the transaction of this connection; return the last number there is."""
        await connection.execute(namespace.sql(TURN))
        row = await (await connection.execute(namespace.sql(LOOK))).fetchone()
        assert row is not None
        last: int = row[0]
        oldest: int = row[1]
        self._settle(last)
        floor = max((mark.id for mark in self._marks if mark.horizon <= oldest), default=self._floor)
        count, highest, mark = AT_ONCE, self._floor, None
        while count == AT_ONCE:
            values = {"floor": highest, "last": last}
            row = await (await connection.execute(namespace.sql(NUMBER), values)).fetchone()
            assert row is not None
            count = row[0]
            if count:
                _, many, highest, horizon = row
                last += many
                mark = Mark(highest, horizon)
        self._latest = Look(last, floor, mark)
        return last

    def _settle(self, last: int) -> None:
        """If the last look's numbers are there, what it found out holds: they are its own, or another's since."""
        if self._latest is not None and self._latest.number <= last:
            self._floor = self._latest.floor
            if self._latest.mark is not None:
                # While one transaction stays open, marks would only become more.
                if len(self._marks) == MARKS:
                    self._marks.pop()
                self._marks.append(self._latest.mark)
            while self._marks and self._marks[0].id <= self._floor:
                self._marks.popleft()
        self._latest = None


async def read(connection: Connection, namespace: Namespace, after: int, most: int = PAGE) -> Sequence[Batch]:
    """Return what was numbered after that, in order."""
    rows = await (await connection.execute(namespace.sql(READ), {"after": after, "most": most})).fetchall()
    return [Batch(*row) for row in rows]


async def names(connection: Connection, namespace: Namespace) -> dict[int, str]:
    """Return the names of all actions there ever were."""
    return dict(await (await connection.execute(namespace.sql(NAMES))).fetchall())


async def is_kept(connection: Connection, namespace: Namespace) -> bool:
    """Whether there is a feed at all."""
    return (await (await connection.execute(namespace.sql(IS_KEPT))).fetchone()) == (True,)


async def keep(connection: Connection, namespace: Namespace, kept: timedelta) -> None:
    """Say how long changes are kept, by all instances; not at all switches the feed off."""
    await connection.execute(namespace.sql(KEEP), {"kept": kept})


async def oldest_kept(connection: Connection, namespace: Namespace) -> int:
    """Return below which id all was kept for long enough."""
    row = await (await connection.execute(namespace.sql(CUTOFF))).fetchone()
    return row[0] if row else ALL


async def forget(connection: Connection, namespace: Namespace, cutoff: int, floor: int = 0) -> tuple[int, int]:
    """Forget some rows between these ids, in the transaction of this connection; return how many, and the highest."""
    await connection.execute(namespace.sql(TURN))
    row = await (await connection.execute(namespace.sql(FORGET), {"floor": floor, "cutoff": cutoff})).fetchone()
    assert row is not None
    return row[0], row[1] or floor
