"""The feed: every change of state of every run, numbered in one order that is the same at every instance.

Each statement that changes the state of runs inserts one feed row for all of them (`feed_insert_sql`), in its own
transaction. The row has no number yet, so no writer waits for another. Transactions do not commit in the order in
which they begin: if the insert drew the number, a reader that has seen a higher number would skip a row that commits
late. Therefore readers assign the numbers afterwards, to the rows that are visible by then (`feed_numbers.py`). A row
that becomes visible later gets a higher number: a client that has seen number n has seen every change up to n.

The setting `FLOTILLA_FEED_RETENTION` says how long rows are kept; `feed_pruner.py` deletes older ones. If rows are
deleted before any reader has numbered them, one row takes their numbers, so that a client that returns sees the gap.

Not in the feed: the events that runs emit (`events.py`), and why a run ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

import pydantic_core

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.runs.effects.events import STATE

# How many rows one statement reads, and how many changes in them, whichever comes first.
PAGE_ROWS = 50
PAGE_CHANGES = 5000
# The state of a row that replaces rows which were pruned before any reader had numbered them.
UNREAD = "unread"
# About how many bytes of memory a change takes, including its encoded form for clients.
CHANGE_WEIGHT = 280


def feed_insert_sql(changed: str, state: str = "state", seq: str = "events") -> str:
    """Return the INSERT of the changed runs in a CTE: its columns are `id`, `action_id`, `attempt`, `instance` and
    those named by `state` and `seq`."""
    return f"""
    INSERT INTO {{schema}}.feed (state, instance, many, runs, actions, seqs, attempts)
    SELECT {state}, instance, count(*), array_agg(id), array_agg(action_id), array_agg({seq}), array_agg(attempt)
    FROM {changed}
    WHERE (SELECT kept > '0' FROM {{schema}}.feed_settings)
    GROUP BY 1, 2
    """


# Begins with the row that contains the next number.
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
        LIMIT %(limit)s
    ) AS page
) AS p
WHERE before < {PAGE_CHANGES}
ORDER BY first
""")

ACTION_NAMES = Statement("SELECT id, name FROM {schema}.actions")

SET_RETENTION = Statement("UPDATE {schema}.feed_settings SET kept = %(kept)s WHERE kept IS DISTINCT FROM %(kept)s")


class Change(NamedTuple):
    """One run's change of state."""

    number: int
    run_id: int
    action_id: int
    # The change's number among the run's own events.
    seq: int
    state: str
    attempt: int
    instance: str | None
    at: datetime

    def as_json(self, names: Mapping[int, str]) -> str:
        """Return the change as an event of its run, with the action's name."""
        event = {
            "run": self.run_id,
            "action": names.get(self.action_id),
            "seq": self.seq,
            "kind": STATE,
            "data": {"state": self.state, "attempt": self.attempt, "instance": self.instance},
            "at": self.at,
        }
        return pydantic_core.to_json(event).decode()


@dataclass(slots=True)
class Batch:
    """A row of the feed: the changes that one statement made."""

    # The number of its first change, and how many changes it has.
    first: int
    many: int
    at: datetime
    state: str
    instance: str | None
    runs: list[int]
    actions: list[int]
    seqs: list[int]
    attempts: list[int]
    # Each change as it is sent; the first client that needs it encodes it for all.
    encoded: list[bytes] | None = field(default=None, compare=False, repr=False)

    @property
    def seq(self) -> int:
        """The number of its last change."""
        return self.first + self.many - 1

    def missing(self, after: int) -> int:
        """Return the last number that is no longer stored, for a client that has seen everything up to `after`."""
        return self.seq if self.state == UNREAD else max(after, self.first - 1)

    @property
    def weight(self) -> int:
        return CHANGE_WEIGHT * (1 + len(self.runs))

    def after(self, number: int) -> list[Change]:
        return [
            Change(self.first + offset, run_id, action_id, seq, self.state, attempt, self.instance, self.at)
            for offset, (run_id, action_id, seq, attempt) in enumerate(
                zip(self.runs, self.actions, self.seqs, self.attempts, strict=True)
            )
            if self.first + offset > number
        ]


async def read_batches(
    connection: Connection, namespace: Namespace, after: int, limit: int = PAGE_ROWS
) -> Sequence[Batch]:
    """Return the numbered rows with changes after this number, in order."""
    rows = await (await connection.execute(namespace.sql(READ), {"after": after, "limit": limit})).fetchall()
    return [Batch(*row) for row in rows]


async def action_names(connection: Connection, namespace: Namespace) -> dict[int, str]:
    """Return the names of all actions, including actions that the code no longer has."""
    return dict(await (await connection.execute(namespace.sql(ACTION_NAMES))).fetchall())


async def set_retention(connection: Connection, namespace: Namespace, kept: timedelta) -> None:
    """Set for all instances how long changes are kept; zero switches the feed off."""
    await connection.execute(namespace.sql(SET_RETENTION), {"kept": kept})
