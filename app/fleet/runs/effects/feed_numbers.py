"""Numbering the feed: readers assign numbers to the visible rows that have none, one reader at a time.

Guarantee: the numbers of one run's changes follow the order in which they were made.
    A change that follows another change of the same run is made by a transaction that began after the commit of the
    first. So its row has the higher id, and no snapshot shows it without the other. Rows are numbered in the order of
    their ids, at most `NUMBERED_AT_ONCE` in each transaction. A round of several transactions numbers no row above the
    highest id in its first snapshot: such a row may follow a change that has become visible below the ids that this
    round has already numbered.

No session waits for the feed's advisory lock. A reader that does not get it reads the rows that have numbers, and
tries again; another session is numbering at that time.

    failure                                        effect
    a reader dies before its commit                no number was assigned; the next reader assigns them
    a reader freezes while it holds the lock       the server ends its session after `IDLE_TIMEOUT`; until then no row
                                                   is numbered, and writers continue
    there is no reader                             no row is numbered; the pruner deletes them unread (`feed_pruner.py`)
"""

from dataclasses import dataclass
from typing import NamedTuple

import psycopg

from app.fleet.db.namespace import Lock, Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.db.pool.statements import fetch
from app.fleet.runs.effects.feed_floor import Floor, Mark

IDLE = psycopg.pq.TransactionStatus.IDLE
# How many rows one transaction numbers.
NUMBERED_AT_ONCE = 1000
# How many seconds a session may be idle while it holds the lock.
IDLE_TIMEOUT = 5.0
# Not less than any id.
HIGHEST_ID = 2**63 - 1

# A separate statement takes the lock, so that the snapshot of the next one includes everything that the previous
# holder committed. An index scan stops after `NUMBERED_AT_ONCE` rows; a bitmap scan would read every row without a
# number. The planner chooses the bitmap scan if its statistics were collected when every row had a number.
TRY_LOCK = Statement(f"""
SELECT pg_try_advisory_xact_lock({{class}}, {Lock.FEED.key(0)}),
       (SELECT kept > '0' FROM {{schema}}.feed_settings),
       set_config('idle_in_transaction_session_timeout', '{IDLE_TIMEOUT * 1000:.0f}', true),
       set_config('enable_bitmapscan', 'off', true)
""")
LAST_NUMBER = "SELECT first + many - 1 FROM {schema}.feed WHERE first IS NOT NULL ORDER BY first DESC LIMIT 1"
READ_LAST_NUMBER = Statement(f"SELECT coalesce(({LAST_NUMBER}), 0)")
# Every change has a number; a row stores the number of its first change. The last column, the highest id in this
# snapshot, is read only if there is more to number.
ASSIGN_NUMBERS = Statement(f"""
WITH last AS MATERIALIZED (
    SELECT coalesce(({LAST_NUMBER}), 0) AS number
), new AS MATERIALIZED (
    SELECT id, sum(many) OVER (ORDER BY id) - many AS before
    FROM (
        SELECT id, many
        FROM {{schema}}.feed
        WHERE first IS NULL AND id > %(after)s AND id <= %(top)s
        ORDER BY id
        LIMIT {NUMBERED_AT_ONCE}
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
       CASE WHEN count(*) = {NUMBERED_AT_ONCE}
            THEN (SELECT id FROM {{schema}}.feed WHERE first IS NULL ORDER BY id DESC LIMIT 1) END
FROM numbered
""")


class Numbering(NamedTuple):
    """The result of one step."""

    # The highest number in the feed.
    last_number: int
    # Whether every row that was visible when the round began now has a number.
    complete: bool
    # Whether another session is numbering.
    busy: bool
    # Whether the feed is switched on.
    enabled: bool


@dataclass
class Round:
    """An unfinished round: the rows up to the id `after` are numbered, those up to `top` are not."""

    after: int
    top: int
    # The id to which the floor rises at the end of the round.
    floor: int


class Numberer:
    """Assigns numbers. Each reader has its own, and its calls do not overlap."""

    def __init__(self) -> None:
        self._floor = Floor()
        self._round: Round | None = None

    @property
    def in_round(self) -> bool:
        """Whether the next step continues a round that began earlier."""
        return self._round is not None

    async def step(self, connection: Connection, namespace: Namespace) -> Numbering:
        """Number up to `NUMBERED_AT_ONCE` rows in a transaction; none if another session holds the lock."""
        assert connection.info.transaction_status is IDLE
        # An explicit transaction, because the connection may be in autocommit: the lock is held until the commit.
        async with connection.transaction():
            ((locked, enabled, *_),) = await fetch(connection, namespace.sql(TRY_LOCK))
            if not locked:
                ((last,),) = await fetch(connection, namespace.sql(READ_LAST_NUMBER))
                return Numbering(last, complete=False, busy=True, enabled=enabled)
            begun = self._round
            values = {"after": begun.after if begun else self._floor.id, "top": begun.top if begun else HIGHEST_ID}
            rows = await fetch(connection, namespace.sql(ASSIGN_NUMBERS), values)
        ((last, count, highest, oldest, horizon, top),) = rows
        # Only after the commit: an error leaves the floor and the round unchanged.
        highest = max(highest, values["after"])
        top = begun.top if begun else top
        to = begun.floor if begun else self._floor.reachable(oldest)
        if count == NUMBERED_AT_ONCE and highest < top:
            self._round = Round(highest, top, to)
        else:
            self._round = None
            self._floor.rise(to, Mark(highest, horizon) if highest > self._floor.id else None)
        return Numbering(last, complete=self._round is None, busy=False, enabled=enabled)
