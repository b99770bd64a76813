"""Triggers whose outcome is known, also if the connection breaks before PostgreSQL has confirmed the commit.

Such a request is repeated on another connection, and is made so that this is harmless. A run with a key is made once
anyway (`trigger.py`). For those without, the statement that inserts them also inserts a mark into `run_keys`, drawn for
this request: the key `request:…` of action 0, which there is not, with the ids of the runs. It is forgotten with the
first of them.

    the first commit                              the repetition
    was done                                      finds the mark: these runs are the answer
    was not done                                  inserts mark and runs
    is under way                                  its insert of the mark waits; then it is one of the two above
    arrives after the repetition was committed    fails there, because its mark is taken

If the database does not answer within `PATIENCE`, the outcome stays unknown, and `OutcomeUnknown` says so. What was not
sent, because no connection was to be had, has no unknown outcome and is not repeated.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import psycopg
from psycopg_pool import PoolClosed, PoolTimeout, TooManyRequests

from app.fleet.db.namespace import Statement
from app.fleet.db.pool import DatabaseAway, shows_an_outage
from app.fleet.db.statements import fetch
from app.fleet.engine.enqueue.trigger import Order, Triggered, Triggers, key_of, known_keys, prepare
from app.fleet.errors import OutcomeUnknown
from app.fleet.runs.records import Trigger

PATIENCE = 5.0
PAUSE = 0.05

Answer = TypeVar("Answer")

FIND_MARK = Statement("SELECT digest FROM {schema}.run_keys WHERE action_id = 0 AND key = %(mark)s")


async def trigger(triggers: Triggers, orders: Sequence[Order], *, by: Trigger) -> list[Triggered]:
    """Insert these, all or none, in a transaction of their own, and know whether it was committed."""
    mark = f"request:{secrets.token_hex(16)}"
    return await repeated(
        lambda: triggers.trigger(orders, by=by, mark=mark), lambda: find_marked(triggers, orders, mark)
    )


async def find_marked(triggers: Triggers, orders: Sequence[Order], mark: str) -> list[Triggered] | None:
    """Return the runs of the request with this mark, if it was committed and had runs without a key."""
    prepared = [prepare(triggers.catalogue, order) for order in orders]
    namespace = triggers.database.namespace
    async with triggers.database.connection() as connection:
        rows = await fetch(connection, namespace.sql(FIND_MARK), {"mark": mark})
        if not rows:
            return None
        keyed = {key_of(each): each for each in prepared if each.order.key is not None}
        by_key = await known_keys(connection, namespace, keyed)
    unkeyed = map(int, rows[0][0].split(","))
    return [
        Triggered(next(unkeyed) if each.order.key is None else by_key[key_of(each)], True, each) for each in prepared
    ]


async def nothing() -> None:
    return None


async def repeated(
    work: Callable[[], Awaitable[Answer]], find: Callable[[], Awaitable[Answer | None]] = nothing
) -> Answer:
    """Repeat work that broke off until it is known what became of it; `find` returns what it did, if it was done."""
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
                deadline = deadline or loop.time() + PATIENCE
            elif deadline is None:
                raise
            elif not is_away(error):
                # Perhaps because of the very run, or mark, that the first commit has made in between: look once more.
                refusal = error
                continue
            if loop.time() >= deadline or isinstance(error, PoolClosed):
                raise OutcomeUnknown(
                    "the connection to the database broke before it confirmed the request: look whether the run is "
                    "there before you send it again. With a key, it can be sent again as it is"
                ) from error
            await asyncio.sleep(PAUSE)
        else:
            assert refusal is not None
            raise refusal


def broke_off(error: BaseException) -> bool:
    """Whether something was sent, and the connection broke before the answer came."""
    return isinstance(error, psycopg.Error) and shows_an_outage(error) and not isinstance(error, PoolClosed)


def is_away(error: BaseException) -> bool:
    """Whether there was no connection to be had."""
    return isinstance(error, DatabaseAway | PoolTimeout | TooManyRequests | PoolClosed)
