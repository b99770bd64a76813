"""Pruning the feed: the leader deletes the rows that are older than the feed's retention, in bounded steps.

A step reads the next rows without the lock. If some of them are old, it takes the feed's advisory lock, without waiting
for it, and deletes them. A pass is a series of steps from the floor (`feed_floor.py`) to the first row that is not old.

The row with the highest number is kept beyond the retention, because the next number follows from it. Rows that no
reader has numbered are replaced by one row that takes their numbers; a client that returns sees the gap.
"""

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.db.pool.statements import fetch
from app.fleet.runs.effects.feed import UNREAD
from app.fleet.runs.effects.feed_floor import Floor, Mark
from app.fleet.runs.effects.feed_numbers import HIGHEST_ID, LAST_NUMBER, TRY_LOCK

# How many rows one step deletes.
PRUNED_AT_ONCE = 250

# Without the lock: the next rows by id, and whether each is old.
FIND_OLD = Statement(f"""
SELECT id, at < statement_timestamp() - (SELECT kept FROM {{schema}}.feed_settings),
       pg_snapshot_xmin(pg_current_snapshot())::text::int8, pg_snapshot_xmax(pg_current_snapshot())::text::int8
FROM {{schema}}.feed
WHERE id > %(after)s
ORDER BY id
LIMIT {PRUNED_AT_ONCE}
""")

# With the lock. Keeps the row with the highest number. While no row has a number, all may be deleted, because the row
# that replaces them gets the first number.
PRUNE = Statement(f"""
WITH deleted AS (
    DELETE FROM {{schema}}.feed
    WHERE id = ANY (%(ids)s::int8[]) AND (first IS NULL OR first < (SELECT max(first) FROM {{schema}}.feed))
    RETURNING id, first, many
), unread AS (
    INSERT INTO {{schema}}.feed (first, state, many, runs, actions, seqs, attempts)
    SELECT coalesce(({LAST_NUMBER}), 0) + 1, '{UNREAD}', sum(many), '{{}}', '{{}}', '{{}}', '{{}}'
    FROM deleted
    WHERE first IS NULL
    HAVING count(*) > 0
)
SELECT id FROM deleted
""")


class FeedPruner:
    def __init__(self) -> None:
        self._floor = Floor()
        self._after = 0
        # State of the current pass: the id to which the floor may rise at its end, the lowest id that was not deleted,
        # and the transactions that were in progress at its latest read.
        self._reachable = 0
        self._lowest_left = HIGHEST_ID
        self._horizon = 0

    async def step(self, connection: Connection, namespace: Namespace) -> bool:
        """Read the next rows and delete the old ones; return whether there may be more."""
        rows = await fetch(connection, namespace.sql(FIND_OLD), {"after": self._after})
        old, deleted = [row[0] for row in rows if row[1]], set[int]()
        if self._after == self._floor.id and rows:
            self._reachable, self._lowest_left = self._floor.reachable(rows[0][2]), HIGHEST_ID
        if rows:
            self._horizon = rows[0][3]
        if old:
            async with connection.transaction():
                ((locked, *_),) = await fetch(connection, namespace.sql(TRY_LOCK))
                if not locked:
                    return True
                deleted = {row[0] for row in await fetch(connection, namespace.sql(PRUNE), {"ids": old})}
            self._after = old[-1]
        self._lowest_left = min({self._lowest_left, *(row[0] for row in rows)} - deleted)
        if len(old) == PRUNED_AT_ONCE:
            return True
        mark = Mark(self._after, self._horizon) if self._after > self._floor.id else None
        self._floor.rise(min(self._reachable, self._lowest_left - 1), mark)
        self._after = self._floor.id
        return False
