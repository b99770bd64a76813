"""Triggering: the API with which a service's code creates runs, and `Triggers`, which executes it.

    await research_filing.trigger(filing, session=session)
    await trigger("research-filing", filing, session=session)

A type checker checks the payload of the first; the second does not import the action. With `session`, the run exists
exactly if the caller's transaction commits, and no instance is notified before that.

    orders.py       the orders, and their checks
    insert.py       how checked orders become runs
    keys.py         a `key` creates one run
    confirm.py      the outcome is known even if the connection breaks during the commit
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.db.pool.pool import Database
from app.fleet.db.pool.statements import Place
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.creator import current_creator
from app.fleet.engine.enqueue.insert import Triggered, insert
from app.fleet.engine.enqueue.orders import Order, Origin, prepare
from app.fleet.runs.read.records import Trigger
from app.fleet.stream.hub import Hub
from app.fleet.telemetry import tracing
from app.fleet.telemetry.logs import current_run, first_request


class Triggers:
    """Creates runs for one service: with its actions, its namespace and its pool."""

    def __init__(self, database: Database, catalogue: Catalogue, hub: Hub) -> None:
        self.catalogue = catalogue
        self.database = database
        self.hub = hub

    async def trigger(
        self, orders: Sequence[Order], session: Place | None = None, *, by: Trigger = "code", mark: str | None = None
    ) -> list[Triggered]:
        """Insert the runs of these orders, all or none, in the transaction of `session` or in one of their own.

        A mark is unique, and is inserted with the runs that have no key: with the same mark, they are inserted once.
        """
        prepared = [prepare(self.catalogue, order) for order in orders]
        if not prepared:
            return []
        with tracing.creating([order.action for order in orders]) as trace_parent:
            run = current_run.get()
            origin = Origin(by, first_request(), trace_parent, None if run is None else run.run_id)
            if session is not None:
                return await insert(session, self.database.namespace, prepared, origin, mark)
            is_one_statement = all(each.is_one_statement for each in prepared)
            borrowed = self.database.autocommit if is_one_statement else self.database.connection
            async with borrowed() as connection:
                return await insert(connection, self.database.namespace, prepared, origin, mark)

    async def create(
        self,
        action: str,
        payload: Any,
        key: str | None,
        run_at: datetime | None,
        priority: int | None,
        ordering_key: str | None,
        session: Place | None,
    ) -> int:
        """Create a run; return its id."""
        (done,) = await self.trigger([Order(action, payload, key, run_at, priority, ordering_key)], session)
        return done.id


# -- for the service's code -------------------------------------------------------------------------------------------


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
    """Create a run of an action; return its id. With `session`, the run exists exactly if that transaction commits."""
    name = action if isinstance(action, str) else action.name
    return await current_creator().create(name, payload, key, run_at, priority, ordering_key, session)


async def trigger_many(orders: Sequence[Order], *, session: Place | None = None) -> list[int]:
    """Create the runs of many orders, all or none, in a few statements; return their ids in the same order."""
    return [done.id for done in await here().trigger(orders, session)]


def transaction() -> AbstractAsyncContextManager[AsyncSession]:
    """One transaction on the service's database, committed at the end; for actions (a route has `InSession`)."""
    return here().database.session()


def here() -> Triggers:
    creator = current_creator()
    assert isinstance(creator, Triggers), "the engine sets no other"
    return creator
