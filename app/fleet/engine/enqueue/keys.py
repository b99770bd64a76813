"""Keys: a key creates one run of an action, for as long as the run is stored.

Guarantee: of several orders with the same key, one creates a run, and the others get that run.
    A key is a row of `run_keys`, inserted before the run by `ON CONFLICT DO NOTHING`. Of two transactions at the same
    time, the second waits until the first has committed, and then inserts nothing. A separate statement reads the run
    of the first, because only its snapshot includes that commit. Keys are inserted in order, so two batches can wait
    for each other but cannot deadlock.

An Idempotency-Key of a request is a key too, with the digest of the request: the same key with another body is refused.
While a request with this key is in progress, a second one is refused (`lock_request_key`).
"""

from collections.abc import Mapping
from typing import TypeAlias

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.statements import Place, fetch
from app.fleet.engine.enqueue.orders import Prepared
from app.fleet.errors import KeyInFlight, KeyReused

# The action's id, and the key with its kind.
Key: TypeAlias = tuple[int, str]

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

FIND_RUNS = Statement("""
SELECT k.action_id, k.key, k.run_id, k.digest
FROM {schema}.run_keys AS k
JOIN unnest(%(actions)s::int[], %(keys)s::text[]) AS w (action_id, key) USING (action_id, key)
""")

# The lock of a request with an Idempotency-Key: another transaction holds it while its request is in progress.
TRY_LOCK = Statement("SELECT pg_try_advisory_xact_lock({class}, hashtext(%(key)s) | -2147483648)")


def key_of(order: Prepared) -> Key:
    return order.action_id, f"key:{order.order.key}"


async def take_keys(
    connection: Place, namespace: Namespace, orders: Mapping[Key, Prepared]
) -> tuple[dict[Key, int], dict[Key, int]]:
    """Take the free keys; return the ids for their new runs, and the existing runs of the other keys."""
    new: dict[Key, int] = {}
    existing: dict[Key, int] = {}
    # A second pass is needed only if a key was pruned, with its run, between the two statements.
    for _ in range(3):
        left = {key: each for key, each in orders.items() if key not in new and key not in existing}
        if not left:
            break
        values = {
            "actions": [action_id for action_id, _ in left],
            "keys": [key for _, key in left],
            "digests": [each.order.digest for each in left.values()],
            "ids": [each.id for each in left.values()],
        }
        rows = await fetch(connection, namespace.sql(TAKE_KEYS), values)
        new |= {(action_id, key): run_id for action_id, key, run_id in rows}
        if len(rows) < len(left):
            existing |= await find_runs(connection, namespace, {key: left[key] for key in left if key not in new})
    return new, existing


async def find_runs(connection: Place, namespace: Namespace, orders: Mapping[Key, Prepared]) -> dict[Key, int]:
    """Return the existing runs of these keys; raise `KeyReused` if the digest of a request differs."""
    values = {"actions": [action_id for action_id, _ in orders], "keys": [key for _, key in orders]}
    existing = {}
    for action_id, key, run_id, stored_digest in await fetch(connection, namespace.sql(FIND_RUNS), values):
        digest = orders[action_id, key].order.digest
        if digest is not None and stored_digest is not None and digest != stored_digest:
            raise KeyReused(
                "an earlier request had this Idempotency-Key and a different body: a new request needs a new key"
            )
        existing[action_id, key] = run_id
    return existing


async def lock_request_key(connection: Place, namespace: Namespace, key: str) -> None:
    """Lock an Idempotency-Key until the end of the transaction; raise `KeyInFlight` if another request has it."""
    ((locked,),) = await fetch(connection, namespace.sql(TRY_LOCK), {"key": key})
    if not locked:
        raise KeyInFlight("a request with this Idempotency-Key is in progress: try again shortly")
