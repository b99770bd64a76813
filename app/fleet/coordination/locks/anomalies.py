"""The anomalies of locks: a lock that has been held for too long, and a lock that had two holders at the same time."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from app.fleet.cluster.anomalies import Anomaly
from app.fleet.cluster.registry import Instance
from app.fleet.coordination.locks.held import RESERVED
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection

HELD_LONG = timedelta(minutes=10)
# How long an overlap is reported.
OVERLAP_AGE = timedelta(days=1)

READ_HELD_LONG = Statement("""
SELECT name, instance, holder, acquired_at
FROM {schema}.service_locks
WHERE instance_id IS NOT NULL AND acquired_at < clock_timestamp() - %(age)s AND NOT starts_with(name, %(reserved)s)
ORDER BY acquired_at
LIMIT 100
""")

READ_OVERLAPS = Statement("""
SELECT DISTINCT ON (name) name, token, instance, other_token, other, found_at
FROM {schema}.lock_overlaps
WHERE found_at > clock_timestamp() - %(age)s
ORDER BY name, id DESC
LIMIT 100
""")


async def of_locks(connection: Connection, namespace: Namespace, _: Sequence[Instance]) -> Iterable[Anomaly]:
    held = await connection.execute(namespace.sql(READ_HELD_LONG), {"age": HELD_LONG, "reserved": RESERVED})
    overlaps = await connection.execute(namespace.sql(READ_OVERLAPS), {"age": OVERLAP_AGE})
    return [*held_long(await held.fetchall()), *two_holders(await overlaps.fetchall())]


def held_long(locks: Sequence[tuple[Any, ...]]) -> Iterator[Anomaly]:
    for name, instance, holder, since in locks:
        yield Anomaly(
            "lock_held_long",
            name,
            since,
            f"{instance} has held this lock{f' for {holder}' if holder else ''} since {since:%Y-%m-%d %H:%M:%S %Z}: "
            f"find out what its holder does; if it does not end, run `flotilla release {name} --reason …`",
        )


def two_holders(overlaps: Sequence[tuple[Any, ...]]) -> Iterator[Anomaly]:
    for name, token, instance, other_token, other, since in overlaps:
        yield Anomaly(
            "two_holders",
            name,
            since,
            f"{other} was granted the lock with the token {other_token} while {instance} still acted as its holder "
            f"with the token {token}: guarded transactions are in order all the same; check what else both have done",
        )
