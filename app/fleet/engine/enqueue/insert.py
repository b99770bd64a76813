"""Inserting orders: checked orders become runs, in the transaction of the caller.

1. With `overlap="skip"`, the action's lock is taken before anything is written; an active run refuses the order
   (`runs/overlap.py`).
2. Ids are drawn in the order of the batch, if it has both keys and ordering keys. Runs with the same ordering key
   execute in the order of their ids (`dispatch/ordered.py`), and keys are taken in another order.
3. Keys are taken (`keys.py`), and the orders with a free key are inserted. Then the orders without a key are inserted.

Lock order: actions by id, then keys by action and text.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.statements import Place, array, fetch
from app.fleet.engine.enqueue.keys import Key, find_runs, key_of, take_keys
from app.fleet.engine.enqueue.orders import Origin, Prepared
from app.fleet.errors import EngineError
from app.fleet.runs import overlap
from app.fleet.runs.insert import INSERT, INSERT_NUMBERED, INSERT_ORDERED, INSERT_ORDERED_NUMBERED
from app.fleet.runs.read.records import RunRecord

DRAW_IDS = Statement("SELECT nextval('{schema}.runs_id_seq') FROM generate_series(1, %(count)s)")


class Triggered(NamedTuple):
    """The run of an order. `new` is false if an earlier order with the same key created it."""

    id: int
    new: bool
    order: Prepared
    run_at: datetime | None = None
    created_at: datetime | None = None
    origin: Origin | None = None

    def record(self) -> RunRecord | None:
        """Return the run as it was inserted; None for an earlier run, whose present state is unknown."""
        if self.run_at is None or self.created_at is None or self.origin is None:
            return None
        return self.order.record(self.id, self.run_at, self.created_at, self.origin)


async def insert(
    connection: Place, namespace: Namespace, orders: Sequence[Prepared], origin: Origin, mark: str | None = None
) -> list[Triggered]:
    """Insert the runs of these orders in the transaction of `connection`; return one result for each order."""
    await refuse_active(connection, namespace, [each for each in orders if each.action.overlap == "skip"])
    keyed = [each for each in orders if each.order.key is not None]
    if keyed and len(orders) > 1 and any(each.order.ordering_key is not None for each in orders):
        orders = await with_ids(connection, namespace, orders)
        keyed = [each for each in orders if each.order.key is not None]
    unkeyed = [each for each in orders if each.order.key is None]
    by_key = await insert_keyed(connection, namespace, keyed, origin) if keyed else {}
    plain = iter(await insert_unkeyed(connection, namespace, unkeyed, origin, mark) if unkeyed else [])
    # Two orders of a batch with the same key have the same run.
    return [next(plain) if each.order.key is None else by_key[key_of(each)] for each in orders]


async def refuse_active(connection: Place, namespace: Namespace, orders: Sequence[Prepared]) -> None:
    """Lock the actions of these orders, and refuse an order if its action has an active run."""
    if not orders:
        return
    active = await overlap.hold(connection, namespace, {each.action_id for each in orders})
    keyed = {key_of(each): each for each in orders if each.order.key is not None}
    existing = await find_runs(connection, namespace, keyed) if keyed else {}
    # Two orders with the same key are one run.
    new = list({key_of(each): each for each in keyed.values() if key_of(each) not in existing}.values())
    new += [each for each in orders if each.order.key is None]
    seen: set[int] = set()
    for each in new:
        if (run_id := active[each.action_id]) is not None:
            raise overlap.already_active(each.action.name, run_id)
        if each.action_id in seen:
            raise EngineError(f"two orders are for the action {each.action.name!r}, which allows one run at a time")
        seen.add(each.action_id)


async def with_ids(connection: Place, namespace: Namespace, orders: Sequence[Prepared]) -> list[Prepared]:
    """Draw an id for each order, in the order of the batch."""
    rows = await fetch(connection, namespace.sql(DRAW_IDS), {"count": len(orders)})
    return [each._replace(id=row[0]) for each, row in zip(orders, sorted(rows), strict=True)]


async def insert_unkeyed(
    connection: Place, namespace: Namespace, orders: Sequence[Prepared], origin: Origin, mark: str | None
) -> list[Triggered]:
    ids = [each.id for each in orders if each.id is not None]
    rows = await insert_rows(connection, namespace, orders, origin, ids, mark)
    return [Triggered(row[0], True, each, row[1], row[2], origin) for each, row in zip(orders, rows, strict=True)]


async def insert_keyed(
    connection: Place, namespace: Namespace, orders: Sequence[Prepared], origin: Origin
) -> dict[Key, Triggered]:
    """Insert the orders with a free key; for the others, return the existing run."""
    by_key = {key_of(each): each for each in orders}
    new, existing = await take_keys(connection, namespace, by_key)
    found = {key: Triggered(run_id, False, by_key[key]) for key, run_id in existing.items()}
    if new:
        by_id = {run_id: by_key[key] for key, run_id in new.items()}
        rows = await insert_rows(connection, namespace, list(by_id.values()), origin, list(by_id))
        for run_id, run_at, created_at in rows:
            found[key_of(by_id[run_id])] = Triggered(run_id, True, by_id[run_id], run_at, created_at, origin)
    return found


async def insert_rows(
    connection: Place,
    namespace: Namespace,
    orders: Sequence[Prepared],
    origin: Origin,
    ids: Sequence[int],
    mark: str | None = None,
) -> Sequence[tuple[Any, ...]]:
    """Insert the rows, with these ids if there are any; return ids and instants, in the order of the ids."""
    values = {**columns(orders, origin), "mark": mark}
    has_order = any(each.order.ordering_key is not None for each in orders)
    if has_order:
        values["ordering_keys"] = [each.order.ordering_key for each in orders]
    if ids:
        values |= {"ids": ids, "keys": [each.order.key for each in orders]}
        return await fetch(connection, namespace.sql(INSERT_ORDERED_NUMBERED if has_order else INSERT_NUMBERED), values)
    return await fetch(connection, namespace.sql(INSERT_ORDERED if has_order else INSERT), values)


def columns(orders: Sequence[Prepared], origin: Origin) -> dict[str, Any]:
    return {
        "actions": array(each.action_id for each in orders),
        "priorities": array(each.priority for each in orders),
        "run_ats": array(each.order.run_at for each in orders),
        "max_attempts": array(each.action.max_attempts for each in orders),
        "payloads": [each.payload for each in orders],
        "trigger": origin.trigger,
        "triggered_by": origin.triggered_by,
        "request_id": origin.request_id,
        "trace_parent": origin.trace_parent,
    }
