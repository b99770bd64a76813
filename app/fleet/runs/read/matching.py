"""The runs that match a selection: by action, state, key, ordering key, alike errors, words of the error, and ids.

Each part of a selection that an index has is found by that index. The others (an ordering key, words of the error) are
compared with the runs that the index gives, newest first, `WINDOW` of them for one statement. So each statement reads
a bounded number of rows, however many runs there are. `Found.reached` is the id up to which runs were compared; the
next search begins there. A page that says "searched back to run 8123" is true, and never slow.

    selection               candidates
    key                     the keys of the actions (`run_keys`): one run for each action
    alike, with an action   the index on alike errors
    otherwise               the indexes of `pages.py`, by action and state

`walk` repeats this, for a change of all runs that match (`retry_these`, `cancel_these`).
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.db.pool.statements import fetch
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read.pages import NEWEST, ListedRun, branches, filter_name, find_listed, find_page

# How many candidates one statement compares.
WINDOW = 5000
# How many windows `walk` compares: runs that do not match are not searched for without end.
MOST_WINDOWS = 20


@dataclass(frozen=True)
class Selection:
    action_id: int | None = None
    state: RunState | None = None
    key: str | None = None
    ordering_key: str | None = None
    # Only with an action; the runs have failed.
    alike: int | None = None
    # Part of the error, in upper or lower case.
    words: str | None = None
    # Exclusive bounds of the ids.
    after: int = 0
    before: int = NEWEST

    @property
    def is_plain(self) -> bool:
        """Whether a page of runs (`pages.py`) has this filter."""
        return (self.key, self.ordering_key, self.alike, self.words) == (None, None, None, None)


@dataclass(frozen=True)
class Found:
    """The ids that match, newest first."""

    ids: list[int]
    # All runs with a higher id have been compared; None if there are no others.
    reached: int | None


def ids_sql(*, of_action: bool, states: Sequence[str]) -> Statement:
    """Return the statement that reads the newest ids with this filter."""
    return Statement(f"""
SELECT id FROM ({" UNION ALL ".join(branches(of_action, states))}) AS branches ORDER BY id DESC LIMIT %(limit)s
""")


IDS = {
    filter_name(of_action=of_action, states=states): ids_sql(of_action=of_action, states=states)
    for of_action in (False, True)
    for states in ((), *((state,) for state in RunState))
}

IDS_OF_KEY = Statement("""
SELECT k.run_id
FROM {schema}.actions AS a
JOIN {schema}.run_keys AS k ON k.action_id = a.id AND k.key = 'key:' || %(key)s::text
WHERE (%(action_id)s::int IS NULL OR a.id = %(action_id)s) AND k.run_id < %(before)s AND k.run_id > %(after)s
ORDER BY k.run_id DESC
LIMIT %(limit)s
""")

IDS_ALIKE = Statement("""
SELECT r.id
FROM {schema}.finished_runs AS r
WHERE r.alike IS NOT NULL AND (r.action_id, r.alike, r.id) > (%(action_id)s, %(alike)s, %(after)s)
  AND (r.action_id, r.alike, r.id) < (%(action_id)s, %(alike)s, %(before)s)
ORDER BY r.action_id DESC, r.alike DESC, r.id DESC
LIMIT %(limit)s
""")

# `strpos`, not LIKE: the words of a user are no pattern.
MATCH = Statement("""
SELECT r.id
FROM {schema}.runs AS r
WHERE r.id = ANY (%(ids)s::int8[])
  AND (%(state)s::text IS NULL OR r.state = %(state)s)
  AND (%(ordering_key)s::text IS NULL OR r.ordering_key = %(ordering_key)s)
  AND (%(words)s::text IS NULL OR strpos(lower(r.error), lower(%(words)s)) > 0)
UNION ALL
SELECT r.id
FROM {schema}.finished_runs AS r
WHERE r.id = ANY (%(ids)s::int8[])
  AND (%(state)s::text IS NULL OR r.state = %(state)s)
  AND (%(ordering_key)s::text IS NULL OR r.ordering_key = %(ordering_key)s)
  AND (%(words)s::text IS NULL OR strpos(lower(r.error), lower(%(words)s)) > 0)
ORDER BY id DESC
""")

# The lowest id of a run that was created at this instant or later, or one above the highest id, by bisection.
# Ids are drawn in the order in which runs are created, except while a transaction that triggers runs is open.
FIRST_ID_SINCE = Statement("""
WITH RECURSIVE bounds AS (
    SELECT 0::int8 AS low, 1 + greatest(
        (SELECT max(id) FROM {schema}.runs), (SELECT max(id) FROM {schema}.finished_runs), 0
    ) AS high
    UNION ALL
    SELECT CASE WHEN p.created_at < %(since)s THEN greatest(p.id, b.low) + 1 ELSE b.low END,
           CASE WHEN p.created_at < %(since)s THEN b.high ELSE (b.low + b.high) / 2 END
    FROM bounds AS b
    LEFT JOIN LATERAL (
        SELECT e.id, e.created_at
        FROM (
            (SELECT id, created_at FROM {schema}.runs WHERE id >= (b.low + b.high) / 2 ORDER BY id LIMIT 1)
            UNION ALL
            (SELECT id, created_at FROM {schema}.finished_runs WHERE id >= (b.low + b.high) / 2 ORDER BY id LIMIT 1)
        ) AS e
        ORDER BY e.id
        LIMIT 1
    ) AS p ON true
    WHERE b.low < b.high
)
SELECT low FROM bounds ORDER BY high - low LIMIT 1
""")


async def find_ids(connection: Connection, namespace: Namespace, wanted: Selection, limit: int) -> Found:
    """Return the newest ids that match, at most `limit`, among the next `WINDOW` candidates."""
    compares = wanted.ordering_key is not None or wanted.words is not None or wanted.key is not None
    # One more than wanted shows whether there are others.
    window = WINDOW if compares else limit + 1
    values: dict[str, Any] = {
        "action_id": wanted.action_id, "key": wanted.key, "alike": wanted.alike, "limit": window,
        "before": wanted.before, "after": wanted.after,
    }  # fmt: skip
    if wanted.key is not None:
        statement = IDS_OF_KEY
    elif wanted.alike is not None:
        statement = IDS_ALIKE
    else:
        states = [] if wanted.state is None else [wanted.state]
        statement = IDS[filter_name(of_action=wanted.action_id is not None, states=states)]
    # Planned for these values, as in `pages.py`.
    rows = await (await connection.execute(namespace.sql(statement), values, prepare=False)).fetchall()
    candidates = ids = [row[0] for row in rows]
    if compares and candidates:
        values = {
            "ids": candidates, "state": wanted.state, "ordering_key": wanted.ordering_key, "words": wanted.words,
        }  # fmt: skip
        ids = [row[0] for row in await fetch(connection, namespace.sql(MATCH), values)]
    if len(ids) > limit:
        return Found(ids[:limit], ids[limit - 1])
    return Found(ids, candidates[-1] if len(candidates) == window else None)


async def walk(
    connection: Connection, namespace: Namespace, wanted: Selection, *, batch: int, most: int
) -> AsyncIterator[Found]:
    """Yield what matches in batches, newest first, until `most` ids were found or `MOST_WINDOWS` windows compared.

    The last one's `reached` says where to continue.
    """
    left = most
    for _ in range(max(MOST_WINDOWS, most // batch)):
        found = await find_ids(connection, namespace, wanted, min(batch, left))
        yield found
        left -= len(found.ids)
        if found.reached is None or not left:
            return
        wanted = replace(wanted, before=found.reached)


async def find_matching(
    connection: Connection, namespace: Namespace, wanted: Selection, limit: int
) -> tuple[list[ListedRun], int | None]:
    """Return a page of the runs that match, newest first, and where the next search begins, or None."""
    if wanted.is_plain:
        states = [] if wanted.state is None else [wanted.state]
        runs = await find_page(
            connection, namespace, action_id=wanted.action_id, states=states, limit=limit + 1,
            before=wanted.before, after=wanted.after,
        )  # fmt: skip
        return runs[:limit], runs[limit - 1].id if len(runs) > limit else None
    found = await find_ids(connection, namespace, wanted, limit)
    listed = await find_listed(connection, namespace, found.ids) if found.ids else []
    return sorted(listed, key=lambda run: run.id, reverse=True), found.reached


async def first_id_since(connection: Connection, namespace: Namespace, since: datetime) -> int:
    """Return the lowest id of a run that was created since then, or one above the highest id."""
    ((found,),) = await fetch(connection, namespace.sql(FIRST_ID_SINCE), {"since": since})
    return int(found)
