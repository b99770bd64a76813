"""Triggering: an order becomes a run, in the caller's transaction or in one of its own.

    await trigger("research-filing", filing, session=session)

With `session`, the run is there exactly if the caller's transaction commits: the queue is the outbox. Nothing is said
to anyone before that, because PostgreSQL delivers a notification only with its transaction.

A `key` makes one run, for as long as that run is remembered. It is taken in `run_keys` first, with `ON CONFLICT DO
NOTHING`: of two transactions at the same moment, one waits until the other commits, and then finds its run (a statement
later, because only that sees it). Keys are taken in order, so that two batches wait for each other but never both ways.

Runs with the same `ordering_key` are a line (`dispatch/ordered.py`), in the order of their ids: so these are drawn in
the order in which the runs are given, also where keys, which are taken in another one, decide which of them are new.

With `overlap="skip"` the action's lock is taken before anything is written, and an active run refuses the order
(`runs/overlap.py`).

Lock order: actions by id, then keys by action and text.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Database
from app.fleet.db.statements import Place, array, fetch
from app.fleet.engine.actions.action import PRIORITIES, Action, Catalogue
from app.fleet.engine.dispatch import ordered
from app.fleet.errors import EngineError, FleetError, KeyInFlight, KeyReused
from app.fleet.runs import overlap
from app.fleet.runs.feed import feed_insert_sql
from app.fleet.runs.notifications import notify_sql
from app.fleet.runs.records import RunRecord, Trigger
from app.fleet.stream.hub import Hub

KEY_MOST = 200
# What PostgreSQL and Python can both say, in any time zone.
EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
LATEST = datetime(9999, 1, 1, tzinfo=UTC)

# The action's id, and the key with its kind.
Key: TypeAlias = tuple[int, str]


def inserting(columns: str = "", arrays: str = "") -> str:
    """Return the statement that inserts runs, with these columns beside the usual ones.

    With a mark, it can be found out whether the statement was committed (`confirm.py`).
    """
    return f"""
WITH added AS (
    INSERT INTO {{schema}}.runs ({columns}action_id, priority, run_at, max_attempts, payload, trigger)
    SELECT {columns}action_id, priority, coalesce(run_at, now()), max_attempts, payload::json, %(trigger)s
    FROM unnest({arrays}%(actions)s::int[], %(priorities)s::int[], %(run_ats)s::timestamptz[],
                %(max_attempts)s::int[], %(payloads)s::text[])
         WITH ORDINALITY AS o ({columns}action_id, priority, run_at, max_attempts, payload, place)
    ORDER BY place
    RETURNING id, run_at, created_at, action_id, priority, events, attempt, instance
), noted AS (
    {feed_insert_sql("added", "'pending'")}
), told AS (
    {notify_sql("added")}
), marked AS (
    INSERT INTO {{schema}}.run_keys (action_id, key, run_id, digest)
    SELECT 0, %(mark)s::text, min(id), string_agg(id::text, ',' ORDER BY id)
    FROM added
    WHERE %(mark)s::text IS NOT NULL
    HAVING count(*) > 0
)
SELECT id, run_at, created_at FROM added, (SELECT count(*) FROM told) AS t ORDER BY id
"""


INSERT = Statement(inserting())
INSERT_NUMBERED = Statement(inserting("id, key, ", "%(ids)s::int8[], %(keys)s::text[], "))
INSERT_LINED = Statement(inserting("ordering_key, ", "%(ordering_keys)s::text[], "))
INSERT_LINED_NUMBERED = Statement(
    inserting("id, key, ordering_key, ", "%(ids)s::int8[], %(keys)s::text[], %(ordering_keys)s::text[], ")
)

TAKE_KEYS = Statement("""
INSERT INTO {schema}.run_keys (action_id, key, run_id, digest)
SELECT action_id, key, coalesce(id, nextval('{schema}.runs_id_seq')), digest
FROM (
    SELECT *
    FROM unnest(%(actions)s::int[], %(keys)s::text[], %(digests)s::text[], %(ids)s::int8[])
         AS k (action_id, key, digest, id)
    ORDER BY action_id, key
) AS k
ON CONFLICT DO NOTHING
RETURNING action_id, key, run_id
""")

NUMBERS = Statement("SELECT nextval('{schema}.runs_id_seq') FROM generate_series(1, %(many)s)")

KNOWN_KEYS = Statement("""
SELECT k.action_id, k.key, k.run_id, k.digest
FROM {schema}.run_keys AS k
JOIN unnest(%(actions)s::int[], %(keys)s::text[]) AS w (action_id, key) USING (action_id, key)
""")

# A request with this Idempotency-Key is at work in another transaction as long as this cannot be taken.
TRY_KEY = Statement("SELECT pg_try_advisory_xact_lock({class}, hashtext(%(key)s) | -2147483648)")


@dataclass(frozen=True, slots=True)
class Order:
    """One run that is wanted. Without `run_at`: now; `priority`: the action's; `ordering_key`: in no line."""

    action: str
    payload: Any = None
    key: str | None = None
    run_at: datetime | None = None
    priority: int | None = None
    ordering_key: str | None = None
    # Of the request, if it came with an Idempotency-Key.
    digest: str | None = None


class Triggered(NamedTuple):
    """What became of an order. `new` is false if its key had made a run before."""

    id: int
    new: bool
    order: "Prepared"
    run_at: datetime | None = None
    created_at: datetime | None = None

    def record(self, by: Trigger) -> RunRecord | None:
        """Return the run as it was inserted; None for an earlier one, which may be anywhere by now."""
        if self.run_at is None or self.created_at is None:
            return None
        return self.order.record(self.id, self.run_at, self.created_at, by)


class Triggers:
    """Triggers for one service: its actions, its namespace, its pool."""

    def __init__(self, database: Database, catalogue: Catalogue, hub: Hub) -> None:
        self.catalogue = catalogue
        self.database = database
        self.hub = hub

    async def trigger(
        self, orders: Sequence[Order], place: Place | None = None, *, by: Trigger = "code", mark: str | None = None
    ) -> list[Triggered]:
        """Insert these, all or none, in the transaction of `place` or in one of their own.

        A mark is inserted with those that have no key, and is unique: with the same one, they are inserted once.
        """
        prepared = [prepare(self.catalogue, order) for order in orders]
        if not prepared:
            return []
        if place is not None:
            return await insert(place, self.database.namespace, prepared, by, mark)
        simple = all(each.simple for each in prepared)
        if simple:
            async with self.database.autocommit() as connection:
                return await insert(connection, self.database.namespace, prepared, by, mark)
        async with self.database.connection() as connection:
            return await insert(connection, self.database.namespace, prepared, by, mark)


class Prepared(NamedTuple):
    """An order that was checked."""

    order: Order
    action: Action[Any]
    action_id: int
    payload: str | None
    # Its run's, if that was drawn already.
    id: int | None = None

    @property
    def priority(self) -> int:
        """What is stored as such."""
        given = self.action.priority if self.order.priority is None else self.order.priority
        return ordered.apart(given, self.order.ordering_key)

    @property
    def simple(self) -> bool:
        """One statement does it."""
        return self.order.key is None and self.action.overlap != "skip"

    def record(self, identifier: int, run_at: datetime, created_at: datetime, by: Trigger) -> RunRecord:
        return RunRecord(
            id=identifier,
            action=self.action.name,
            state="pending",
            trigger=by,
            payload={} if self.payload is None else json.loads(self.payload),
            scheduled_for=None,
            run_at=run_at,
            ordering_key=self.order.ordering_key,
            attempt=0,
            max_attempts=self.action.max_attempts,
            instance=None,
            result=None,
            error=None,
            progress=None,
            created_at=created_at,
            started_at=None,
            finished_at=None,
        )


def prepare(catalogue: Catalogue, order: Order) -> Prepared:
    """Check an order against the action it is for."""
    action = catalogue[order.action]
    if not is_key(order.key):
        raise EngineError(f"a key has from 1 to {KEY_MOST} printable letters")
    if not is_key(order.ordering_key):
        raise EngineError(f"ordering_key has from 1 to {KEY_MOST} printable letters")
    if order.priority is not None and order.priority not in PRIORITIES:
        raise EngineError(f"a priority is from {PRIORITIES[0]} to {PRIORITIES[-1]}")
    if order.run_at is not None and order.run_at.tzinfo is None:
        raise EngineError("run_at needs a time zone: PostgreSQL's clock and yours may be in different ones")
    if order.run_at is not None and not EARLIEST <= order.run_at <= LATEST:
        raise EngineError(f"run_at is between the years {EARLIEST.year} and {LATEST.year}")
    if order.run_at is not None:
        # PostgreSQL knows no offset of 16 hours or more.
        order = replace(order, run_at=order.run_at.astimezone(UTC))
    return Prepared(order, action, catalogue.id_of(order.action), action.encode(order.payload))


def is_key(text: str | None) -> bool:
    return text is None or (isinstance(text, str) and 0 < len(text) <= KEY_MOST and text.isprintable())


async def insert(
    place: Place, namespace: Namespace, orders: Sequence[Prepared], by: Trigger, mark: str | None = None
) -> list[Triggered]:
    """Insert in whatever transaction `place` is in."""
    await refuse_active(place, namespace, [each for each in orders if each.action.overlap == "skip"])
    keyed = [each for each in orders if each.order.key is not None]
    if keyed and len(orders) > 1 and any(each.order.ordering_key is not None for each in orders):
        orders = await numbered(place, namespace, orders)
        keyed = [each for each in orders if each.order.key is not None]
    unkeyed = [each for each in orders if each.order.key is None]
    by_key = await insert_keyed(place, namespace, keyed, by) if keyed else {}
    plain = iter(await insert_plain(place, namespace, unkeyed, by, mark) if unkeyed else [])
    # A key that stands in a batch twice is one run.
    return [next(plain) if each.order.key is None else by_key[key_of(each)] for each in orders]


async def numbered(place: Place, namespace: Namespace, orders: Sequence[Prepared]) -> list[Prepared]:
    """Draw the ids in the order of the batch."""
    rows = await fetch(place, namespace.sql(NUMBERS), {"many": len(orders)})
    return [each._replace(id=row[0]) for each, row in zip(orders, sorted(rows), strict=True)]


async def insert_plain(
    place: Place, namespace: Namespace, orders: Sequence[Prepared], by: Trigger, mark: str | None
) -> list[Triggered]:
    ids = [each.id for each in orders if each.id is not None]
    rows = await insert_rows(place, namespace, orders, by, ids, mark)
    return [Triggered(row[0], True, each, row[1], row[2]) for each, row in zip(orders, rows, strict=True)]


async def insert_rows(
    place: Place,
    namespace: Namespace,
    orders: Sequence[Prepared],
    by: Trigger,
    ids: Sequence[int],
    mark: str | None = None,
) -> Sequence[tuple[Any, ...]]:
    """Insert these, under these ids if there are any; what is returned is in the order of the ids."""
    values = {**columns(orders, by), "mark": mark}
    lined = any(each.order.ordering_key is not None for each in orders)
    if lined:
        values["ordering_keys"] = [each.order.ordering_key for each in orders]
    if ids:
        values |= {"ids": ids, "keys": [each.order.key for each in orders]}
        return await fetch(place, namespace.sql(INSERT_LINED_NUMBERED if lined else INSERT_NUMBERED), values)
    return await fetch(place, namespace.sql(INSERT_LINED if lined else INSERT), values)


async def insert_keyed(
    place: Place, namespace: Namespace, orders: Sequence[Prepared], by: Trigger
) -> dict[Key, Triggered]:
    """Insert those whose key was free; for the others, find the run that their key made."""
    by_key = {key_of(each): each for each in orders}
    taken, known = await take_keys(place, namespace, by_key)
    done = {key: Triggered(run_id, False, by_key[key]) for key, run_id in known.items()}
    if taken:
        new = {run_id: by_key[key] for key, run_id in taken.items()}
        for run_id, run_at, created_at in await insert_rows(place, namespace, list(new.values()), by, list(new)):
            done[key_of(new[run_id])] = Triggered(run_id, True, new[run_id], run_at, created_at)
    return done


async def take_keys(
    place: Place, namespace: Namespace, orders: Mapping[Key, Prepared]
) -> tuple[dict[Key, int], dict[Key, int]]:
    """Take keys; return the ids of those that are ours now, and the runs of those that were taken before."""
    taken: dict[Key, int] = {}
    known: dict[Key, int] = {}
    # More than once only for a key that was forgotten, with its run, between the two statements.
    for _ in range(3):
        left = {key: each for key, each in orders.items() if key not in taken and key not in known}
        if not left:
            break
        values = {
            "actions": [action_id for action_id, _ in left],
            "keys": [key for _, key in left],
            "digests": [each.order.digest for each in left.values()],
            "ids": [each.id for each in left.values()],
        }
        rows = await fetch(place, namespace.sql(TAKE_KEYS), values)
        taken |= {(action_id, key): run_id for action_id, key, run_id in rows}
        if len(rows) < len(left):
            known |= await known_keys(place, namespace, {key: left[key] for key in left if key not in taken})
    return taken, known


async def known_keys(place: Place, namespace: Namespace, orders: Mapping[Key, Prepared]) -> dict[Key, int]:
    """Return the runs that these keys have made."""
    values = {"actions": [action_id for action_id, _ in orders], "keys": [key for _, key in orders]}
    known = {}
    for action_id, key, run_id, digest in await fetch(place, namespace.sql(KNOWN_KEYS), values):
        given = orders[action_id, key].order.digest
        if given is not None and digest is not None and given != digest:
            raise KeyReused(
                "another request came with this Idempotency-Key before, and its body was different: a new request "
                "needs a new key"
            )
        known[action_id, key] = run_id
    return known


async def refuse_active(place: Place, namespace: Namespace, orders: Sequence[Prepared]) -> None:
    """Refuse orders of actions that want no second run beside the first; before anything is written."""
    if not orders:
        return
    active = await overlap.hold(place, namespace, {each.action_id for each in orders})
    keyed = {key_of(each): each for each in orders if each.order.key is not None}
    known = await known_keys(place, namespace, keyed) if keyed else {}
    # A key that stands here twice is one run.
    new = list({key_of(each): each for each in keyed.values() if key_of(each) not in known}.values())
    new += [each for each in orders if each.order.key is None]
    seen: set[int] = set()
    for each in new:
        if (run_id := active[each.action_id]) is not None:
            raise overlap.already_active(each.action.name, run_id)
        if each.action_id in seen:
            raise EngineError(f"the action {each.action.name!r} stands here twice, and allows one run at a time")
        seen.add(each.action_id)


def key_of(order: Prepared) -> Key:
    return order.action_id, f"key:{order.order.key}"


def columns(orders: Sequence[Prepared], by: Trigger) -> dict[str, Any]:
    return {
        "actions": array(each.action_id for each in orders),
        "priorities": array(each.priority for each in orders),
        "run_ats": array(each.order.run_at for each in orders),
        "max_attempts": array(each.action.max_attempts for each in orders),
        "payloads": [each.payload for each in orders],
        "trigger": by,
    }


async def take_turn(place: Place, namespace: Namespace, key: str) -> None:
    """Let one request with this Idempotency-Key work at a time."""
    ((turn,),) = await fetch(place, namespace.sql(TRY_KEY), {"key": key})
    if not turn:
        raise KeyInFlight("a request with this Idempotency-Key is being worked on: ask again shortly")


# -- for the service's code -------------------------------------------------------------------------------------------

# Whose actions `trigger` means: set for each request and each attempt.
current: ContextVar[Triggers] = ContextVar("flotilla_triggers")


async def trigger(
    action: str | Action[Any],
    payload: Any = None,
    *,
    key: str | None = None,
    run_at: datetime | None = None,
    priority: int | None = None,
    ordering_key: str | None = None,
    session: Place | None = None,
) -> int:
    """Have an action run; return the id of its run. With `session`, exactly if that transaction commits."""
    name = action if isinstance(action, str) else action.name
    (done,) = await here().trigger([Order(name, payload, key, run_at, priority, ordering_key)], session)
    return done.id


async def trigger_many(orders: Sequence[Order], *, session: Place | None = None) -> list[int]:
    """Have many runs, all or none, in a statement or a few; return their ids in the same order."""
    return [done.id for done in await here().trigger(orders, session)]


def transaction() -> AbstractAsyncContextManager[AsyncSession]:
    """One transaction on the service's database, committed at the end; for actions (a route has `InSession`)."""
    return here().database.session()


def here() -> Triggers:
    try:
        return current.get()
    except LookupError:
        raise FleetError(
            "trigger() and transaction() are for the code of a running service: a route, or an action. Elsewhere, use "
            "the REST API or `flotilla trigger`"
        ) from None
