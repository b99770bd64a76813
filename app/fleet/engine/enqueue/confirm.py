"""Triggers with a known outcome, even if the connection breaks before PostgreSQL has confirmed the commit.

Such a request is repeated on another connection, in such a way that this is harmless. An order with a key creates one
run anyway (`keys.py`). For the others, the statement that inserts the runs also inserts a mark into `run_keys`, which
was drawn for this request: the key `request:…` of the action 0, which does not exist, with the ids of the runs. It is
pruned with the first of these runs.

    the first commit                              the repetition
    was done                                      finds the mark, and returns these runs
    was not done                                  inserts the mark and the runs
    is under way                                  its insert of the mark waits; then one of the two cases above
    arrives after the repetition was committed    the first one fails, because its mark exists

If the database does not answer within `CONFIRM_TIMEOUT`, the outcome remains unknown, and `OutcomeUnknown` is raised. A
request that was not sent, because there was no connection, has no unknown outcome and is not repeated.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import psycopg
from psycopg_pool import PoolClosed, PoolTimeout, TooManyRequests

from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import DatabaseAway, shows_an_outage
from app.fleet.db.pool.statements import fetch
from app.fleet.engine.enqueue.insert import Triggered
from app.fleet.engine.enqueue.keys import find_runs, key_of
from app.fleet.engine.enqueue.orders import Order, prepare
from app.fleet.engine.enqueue.trigger import Triggers
from app.fleet.errors import OutcomeUnknown
from app.fleet.runs.read.records import Trigger

CONFIRM_TIMEOUT = 5.0
RETRY_INTERVAL = 0.05

Answer = TypeVar("Answer")

FIND_MARK = Statement("SELECT digest FROM {schema}.run_keys WHERE action_id = 0 AND key = %(mark)s")


async def trigger(triggers: Triggers, orders: Sequence[Order], *, by: Trigger) -> list[Triggered]:
    """Insert the runs of these orders, all or none, in a transaction of their own whose outcome is known."""
    mark = f"request:{secrets.token_hex(16)}"
    return await repeat_until_known(
        lambda: triggers.trigger(orders, by=by, mark=mark), lambda: find_marked(triggers, orders, mark)
    )


async def find_marked(triggers: Triggers, orders: Sequence[Order], mark: str) -> list[Triggered] | None:
    """Return the runs of the request with this mark; None if it was not committed, or all its orders have keys."""
    prepared = [prepare(triggers.catalogue, order) for order in orders]
    namespace = triggers.database.namespace
    async with triggers.database.connection() as connection:
        rows = await fetch(connection, namespace.sql(FIND_MARK), {"mark": mark})
        if not rows:
            return None
        keyed = {key_of(each): each for each in prepared if each.order.key is not None}
        by_key = await find_runs(connection, namespace, keyed)
    unkeyed = map(int, rows[0][0].split(","))
    return [
        Triggered(next(unkeyed) if each.order.key is None else by_key[key_of(each)], True, each) for each in prepared
    ]


async def nothing() -> None:
    return None


async def repeat_until_known(
    work: Callable[[], Awaitable[Answer]], find: Callable[[], Awaitable[Answer | None]] = nothing
) -> Answer:
    """Repeat `work` until its outcome is known; `find` returns the result of a call whose connection broke, if any."""
    loop = asyncio.get_running_loop()
    deadline: float | None = None
    refusal: Exception | None = None
    while True:
        try:
            if deadline is not None and (done := await find()) is not None:
                return done
            if refusal is None:
                return await work()
        except Exception as error:
            if broke_off(error):
                deadline = deadline or loop.time() + CONFIRM_TIMEOUT
            elif deadline is None:
                raise
            elif not is_away(error):
                # The cause may be the run, or the mark, that the first commit has inserted: call `find` again.
                refusal = error
                continue
            if loop.time() >= deadline or isinstance(error, PoolClosed):
                raise OutcomeUnknown(
                    "the connection to the database broke before it confirmed the request: check whether the run "
                    "exists before you send the request again. With a key, it can be sent again unchanged"
                ) from error
            await asyncio.sleep(RETRY_INTERVAL)
        else:
            assert refusal is not None
            raise refusal


def broke_off(error: BaseException) -> bool:
    """Whether the connection broke after something was sent, and before the response arrived."""
    return isinstance(error, psycopg.Error) and shows_an_outage(error) and not isinstance(error, PoolClosed)


def is_away(error: BaseException) -> bool:
    """Whether no connection was available."""
    return isinstance(error, DatabaseAway | PoolTimeout | TooManyRequests | PoolClosed)
