"""A request that is sent again is not done again: `Idempotency-Key`.

The key of a request becomes the key of its run, taken in the transaction that inserts the run
(`engine/enqueue/trigger.py`): either both are there or neither. Sent again, it finds that run; sent again with another
body, which its digest tells, it is refused.

    a second one while the first is at work    waits for its turn, up to `PATIENCE`, then is told to ask again
    the first one's instance dies              its transaction ends, and with it its turn and its key
    the answer is lost on its way              the client sends it again and has the same run
    the connection to the database breaks      the instance does it again itself (`engine/enqueue/confirm.py`)

A batch has one key for many runs. Each run without a key of its own gets one made from it and from its place; a row
beside those of its runs holds the digest of the whole, so that another batch is refused even if it has no action in
common with the first. All of it is remembered for as long as the runs are.

A turn is an advisory lock of the transaction, and so is nothing that anyone could forget to give back. Waiting does not
keep a connection.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated

from fastapi import Header

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Connection, Database
from app.fleet.engine.enqueue.trigger import Order, take_turn
from app.fleet.errors import KeyInFlight, KeyReused
from app.fleet.http.fields import Key

PATIENCE = 0.5
AGAIN = 0.025

# Under the action 0, which there is not.
REMEMBER_BATCH = Statement("""
INSERT INTO {schema}.run_keys AS k (action_id, key, run_id, digest)
VALUES (0, %(key)s, %(run)s, %(digest)s)
ON CONFLICT (action_id, key) DO UPDATE SET digest = k.digest
RETURNING digest
""")


IdempotencyKey = Annotated[
    Key | None,
    Header(alias="Idempotency-Key", description="Sent again with the same key, a request has the same answer"),
]


@asynccontextmanager
async def turn(database: Database, key: str) -> AsyncIterator[Connection]:
    """Borrow a connection, in whose transaction nobody else is working on a request with this key."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while True:
        async with database.connection() as connection:
            if await is_ours(connection, database.namespace, key, last_try=loop.time() >= deadline):
                yield connection
                return
        await asyncio.sleep(AGAIN)


async def is_ours(connection: Connection, namespace: Namespace, key: str, *, last_try: bool) -> bool:
    try:
        await take_turn(connection, namespace, key)
    except KeyInFlight:
        if last_try:
            raise
        return False
    return True


def digest(orders: Sequence[Order]) -> str:
    """Tell whether two requests want the same, however their bodies were written."""
    wanted = [
        [each.action, each.payload, each.key, each.run_at and each.run_at.timestamp(), each.priority]
        # Not where there is none: digests are compared with those of releases that did not know it.
        + ([] if each.ordering_key is None else [each.ordering_key])
        for each in orders
    ]
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()


def keyed(orders: Sequence[Order], key: str, wanted: str) -> list[Order]:
    """Give each order that has no key one that is made from the batch's."""
    # Of a length that does not depend on the key's.
    stem = hashlib.sha256(key.encode()).hexdigest()
    return [
        each if each.key is not None else replace(each, key=f"batch:{stem}:{number}", digest=wanted)
        for number, each in enumerate(orders)
    ]


async def remember_batch(connection: Connection, namespace: Namespace, key: str, wanted: str, first_run: int) -> None:
    """Hold what a batch was, for as long as its first run is remembered."""
    values = {"key": f"batch:{key}", "run": first_run, "digest": wanted}
    row = await (await connection.execute(namespace.sql(REMEMBER_BATCH), values)).fetchone()
    if row != (wanted,):
        raise KeyReused(
            "another batch came with this Idempotency-Key before, and its body was different: a new request needs a "
            "new key"
        )
