"""`Idempotency-Key`: a request that is sent again with the same key creates no second run.

Guarantee: at most one run for a key, as long as the run is stored.
    The key of the request becomes the key of its run. The transaction that inserts the run also inserts the key
    (`engine/enqueue/keys.py`). A repeated request finds the key and returns that run. The digest of the request is
    stored too: a request with the same key and another body is refused.

    a second request while the first one runs    waits for up to `TIMEOUT`, then is refused with `key-in-flight`
    the instance of the first request dies       its transaction rolls back, which releases the lock and the key
    the response is lost                         the client sends the request again and receives the same run
    the connection to the database breaks        the instance repeats the statement (`engine/enqueue/confirm.py`)

A batch has one key for many runs. For a run without its own key, a key is derived from the batch's key and the run's
position. One more row holds the digest of the whole batch, so that another batch with this key is refused
even if the two have no action in common.

While a request is processed, its transaction holds an advisory lock for the key. The end of the transaction releases
the lock, so no lock can be left behind. A request that waits for the lock holds no connection.
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
from app.fleet.db.pool.pool import Connection, Database
from app.fleet.engine.enqueue.keys import lock_request_key
from app.fleet.engine.enqueue.orders import Order
from app.fleet.errors import KeyInFlight, KeyReused
from app.fleet.http.fields import Key

TIMEOUT = 0.5
RETRY_INTERVAL = 0.025

# The row belongs to action 0, which does not exist.
REMEMBER_BATCH = Statement("""
INSERT INTO {schema}.run_keys AS k (action_id, key, run_id, digest)
VALUES (0, %(key)s, %(run)s, %(digest)s)
ON CONFLICT (action_id, key) DO UPDATE SET digest = k.digest
RETURNING digest
""")


IdempotencyKey = Annotated[
    Key | None,
    Header(alias="Idempotency-Key", description="A request that is sent again with the same key has the same response"),
]


@asynccontextmanager
async def locked_connection(database: Database, key: str) -> AsyncIterator[Connection]:
    """Yield a connection whose transaction holds the lock of this key."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + TIMEOUT
    while True:
        last_try = loop.time() >= deadline
        async with database.connection() as connection:
            try:
                await lock_request_key(connection, database.namespace, key)
            except KeyInFlight:
                if last_try:
                    raise
            else:
                yield connection
                return
        await asyncio.sleep(RETRY_INTERVAL)


def digest(orders: Sequence[Order]) -> str:
    """Return a digest that is equal for two requests if they order the same runs, however their bodies are written."""
    values = [
        [each.action, each.payload, each.key, each.run_at and each.run_at.timestamp(), each.priority]
        # Left out if unset: digests of earlier releases, which did not have it, must stay equal.
        + ([] if each.ordering_key is None else [each.ordering_key])
        for each in orders
    ]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def keyed(orders: Sequence[Order], key: str, batch_digest: str) -> list[Order]:
    """Return the orders; each one without a key has a key that is derived from the batch's."""
    # Hashed, so that its length does not depend on the key's.
    stem = hashlib.sha256(key.encode()).hexdigest()
    return [
        each if each.key is not None else replace(each, key=f"batch:{stem}:{number}", digest=batch_digest)
        for number, each in enumerate(orders)
    ]


async def store_batch(
    connection: Connection, namespace: Namespace, key: str, batch_digest: str, first_run: int
) -> None:
    """Store the digest of a batch for as long as its first run is stored; refuse another batch with this key."""
    values = {"key": f"batch:{key}", "run": first_run, "digest": batch_digest}
    row = await (await connection.execute(namespace.sql(REMEMBER_BATCH), values)).fetchone()
    if row != (batch_digest,):
        raise KeyReused(
            "another batch with a different body was sent with this Idempotency-Key: use a new key for a new request"
        )
