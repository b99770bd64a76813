"""Pages of runs: newest first, found by an index, with extracts of large fields.

The payload, result, progress and error of a run may have megabytes. A list includes such a field if its text has at
most `MAX_WHOLE` bytes. Otherwise the field is null, and `truncated` has the first `EXTRACT` characters of its text
under the field's name. PostgreSQL cuts the text, so nothing larger is sent or kept in memory. `records.find` returns
the whole run.

One statement with one snapshot finds a page in two steps. The first reads only ids, backwards along an index, and stops
after a page; the second reads these runs.

    filter                          index
    none                            the primary keys
    action                          runs_pending_newest, runs_running; finished_runs_action_state, once for each state
    action and state                the index above that has this state
    pending                         the primary key of `runs`: nearly all runs in it are pending
    running                         runs_running: read whole; it has the runs that all instances run at this time
    failed, cancelled               finished_runs_unwell
    succeeded                       the primary key of `finished_runs`: skips runs that did not succeed
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from psycopg.rows import class_row

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.db.stored_json import StoredJsonLoader
from app.fleet.runs.effects.states import ACTIVE, RunState
from app.fleet.runs.read.records import ORIGIN, RunRecord

MAX_WHOLE = 1024
EXTRACT = 200
# Greater than any id.
NEWEST = 2**63 - 1
# The bytes that a stored value has in addition to its text. A compressed value has fewer bytes than its text.
VALUE_HEADER = 4


@dataclass(frozen=True, slots=True)
class ListedRun(RunRecord):
    """A run in a list. A long payload, result, error or progress is null, and `truncated` has its beginning."""

    truncated: Mapping[str, str]


def listed(table: str, result: str, finished_at: str) -> str:
    """Return the SELECT of runs of a table, as a list shows them."""
    return f"""
    SELECT r.id, a.name AS action, r.state, r.trigger,
           CASE WHEN r.payload IS NULL THEN '{{}}' WHEN short.payload THEN r.payload END AS payload,
           r.scheduled_for, r.run_at, r.ordering_key, r.attempt, r.max_attempts, r.instance,
           CASE WHEN short.result THEN {result} END AS result,
           CASE WHEN short.error THEN r.error END AS error,
           CASE WHEN short.progress THEN r.progress END AS progress,
           {ORIGIN}, r.created_at, r.started_at,
           {finished_at} AS finished_at,
           CASE WHEN false IN (short.payload, short.result, short.error, short.progress)
                THEN json_strip_nulls(json_build_object(
                    'payload', CASE WHEN NOT short.payload THEN left(r.payload::text, {EXTRACT}) END,
                    'result', CASE WHEN NOT short.result THEN left({result}::text, {EXTRACT}) END,
                    'error', CASE WHEN NOT short.error THEN left(r.error, {EXTRACT}) END,
                    'progress', CASE WHEN NOT short.progress THEN left(r.progress::text, {EXTRACT}) END
                ))
                ELSE '{{}}' END AS truncated
    FROM {{schema}}.{table} AS r
    JOIN {{schema}}.actions AS a ON a.id = r.action_id, LATERAL (
        SELECT {is_short("r.payload")} AS payload, {is_short(result)} AS result,
               {is_short("r.error")} AS error, {is_short("r.progress")} AS progress
        OFFSET 0
    ) AS short
    """


def is_short(column: str) -> str:
    """Return the condition that a field is short. It checks the stored size first, without reading the value itself."""
    return f"pg_column_size({column}) <= {MAX_WHOLE + VALUE_HEADER} AND octet_length({column}::text) <= {MAX_WHOLE}"


FROM_ACTIVE = listed("runs", "NULL::json", "NULL::timestamptz")
FROM_FINISHED = listed("finished_runs", "r.result", "r.finished_at")
LIST = Statement(f"{FROM_ACTIVE} WHERE r.id = ANY (%(ids)s) UNION ALL {FROM_FINISHED} WHERE r.id = ANY (%(ids)s)")


def page_sql(*, of_action: bool, states: Sequence[str]) -> Statement:
    """Return the statement that reads a page with this filter."""
    return Statement(f"""
WITH page AS MATERIALIZED (
    SELECT id FROM ({" UNION ALL ".join(branches(of_action, states))}) AS branches ORDER BY id DESC LIMIT %(limit)s
)
{FROM_ACTIVE} WHERE r.id = ANY (ARRAY(SELECT id FROM page))
UNION ALL
{FROM_FINISHED} WHERE r.id = ANY (ARRAY(SELECT id FROM page))
ORDER BY id DESC
""")


def branches(of_action: bool, states: Sequence[str]) -> Iterator[str]:
    """Yield a SELECT for each index to read: the newest ids between `after` and `before`."""
    if not of_action and not states:
        yield from (branch(table, "TRUE") for table in ("runs", "finished_runs"))
    for state in RunState:
        if state not in states and not (of_action and not states):
            continue
        table = "runs" if state in ACTIVE else "finished_runs"
        # A literal, not a parameter: most states have a partial index.
        is_state = f"r.state = '{state}'"
        if state is RunState.RUNNING:
            yield running(f"{is_state} AND r.action_id = %(action_id)s" if of_action else is_state)
        elif not of_action:
            yield branch(table, is_state)
        elif state is RunState.PENDING:
            yield branch_of_action(table, is_state, "r.action_id", "%(action_id)s")
        else:
            yield branch_of_action(table, "TRUE", "r.action_id, r.state", f"%(action_id)s, '{state}'")


def branch(table: str, where: str) -> str:
    return f"""(
        SELECT r.id
        FROM {{schema}}.{table} AS r
        WHERE {where} AND r.id < %(before)s AND r.id > %(after)s
        ORDER BY r.id DESC
        LIMIT %(limit)s
    )"""


def branch_of_action(table: str, where: str, columns: str, values: str) -> str:
    """Return the SELECT that reads the index of these columns and the id.

    The condition is a range, not an equality. With an equality, the planner may read the primary key backwards, past
    all runs of other actions, because it assumes that an action's runs are spread evenly.
    """
    descending = columns.replace(",", " DESC,")
    return f"""(
        SELECT r.id
        FROM {{schema}}.{table} AS r
        WHERE {where} AND ({columns}, r.id) > ({values}, %(after)s) AND ({columns}, r.id) < ({values}, %(before)s)
        ORDER BY {descending} DESC, r.id DESC
        LIMIT %(limit)s
    )"""


def running(where: str) -> str:
    """Return the SELECT that reads all running runs by their index, and then sorts them.

    `OFFSET 0` prevents the planner from reading the primary key backwards, past all pending runs.
    """
    return f"""(
        SELECT id
        FROM (
            SELECT r.id FROM {{schema}}.runs AS r WHERE {where} AND r.id < %(before)s AND r.id > %(after)s OFFSET 0
        ) AS running
        ORDER BY id DESC
        LIMIT %(limit)s
    )"""


def filter_name(*, of_action: bool, states: Sequence[str]) -> str:
    return f"{'action' if of_action else 'all'}_{'_'.join(states) or 'newest'}"


# The statements for filters with at most one state. Filters with several states are rare: `find_page` builds those.
PAGES = {
    filter_name(of_action=of_action, states=states): page_sql(of_action=of_action, states=states)
    for of_action in (False, True)
    for states in ((), *((state,) for state in RunState))
}


async def find_page(
    connection: Connection,
    namespace: Namespace,
    *,
    action_id: int | None = None,
    states: Sequence[str] = (),
    limit: int = 50,
    before: int | None = None,
    after: int = 0,
) -> list[ListedRun]:
    """Return a page of runs, newest first, with ids between `after` and `before`, the last id of the previous page."""
    of_action = action_id is not None
    name = filter_name(of_action=of_action, states=states)
    statement = PAGES[name] if name in PAGES else page_sql(of_action=of_action, states=states)
    values = {"action_id": action_id, "limit": limit, "before": NEWEST if before is None else before, "after": after}
    async with connection.cursor(row_factory=class_row(ListedRun)) as cursor:
        cursor.adapters.register_loader("json", StoredJsonLoader)
        # Planned for these values: a generic plan may read whole tables.
        await cursor.execute(namespace.sql(statement), values, prepare=False)
        return await cursor.fetchall()


async def find_listed(connection: Connection, namespace: Namespace, identifiers: Sequence[int]) -> list[ListedRun]:
    """Return the runs with these ids, as a list shows them, in any order."""
    async with connection.cursor(row_factory=class_row(ListedRun)) as cursor:
        cursor.adapters.register_loader("json", StoredJsonLoader)
        await cursor.execute(namespace.sql(LIST), {"ids": list(identifiers)})
        return await cursor.fetchall()
