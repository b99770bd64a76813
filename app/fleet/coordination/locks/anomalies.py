"""The anomalies of locks: one that has been held for too long, and one that two instances have held at a time."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from app.fleet.cluster.anomalies import Anomaly
from app.fleet.cluster.registry import Instance
from app.fleet.coordination.locks.lock import RESERVED
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Connection

HELD_LONG = timedelta(minutes=10)
# How long an overlap is shown.
REMEMBERED = timedelta(days=1)

HELD_TOO_LONG = Statement("""
SELECT name, instance, holder, acquired_at
FROM {schema}.service_locks
WHERE instance_id IS NOT NULL AND acquired_at < clock_timestamp() - %(long)s AND NOT starts_with(name, %(but)s)
ORDER BY acquired_at
LIMIT 100
""")

OVERLAPS = Statement("""
SELECT DISTINCT ON (name) name, token, instance, other_token, other, found_at
FROM {schema}.lock_overlaps
WHERE found_at > clock_timestamp() - %(within)s
ORDER BY name, id DESC
LIMIT 100
""")


async def of_locks(connection: Connection, namespace: Namespace, _: Sequence[Instance]) -> Iterable[Anomaly]:
    long = await connection.execute(namespace.sql(HELD_TOO_LONG), {"long": HELD_LONG, "but": RESERVED})
    twice = await connection.execute(namespace.sql(OVERLAPS), {"within": REMEMBERED})
    return [*held_long(await long.fetchall()), *two_holders(await twice.fetchall())]


def held_long(locks: Sequence[tuple[Any, ...]]) -> Iterator[Anomaly]:
    for name, instance, holder, since in locks:
        yield Anomaly(
            "lock_held_long",
            name,
            since,
            f"{instance} has held this lock{f' for {holder}' if holder else ''} since {since:%Y-%m-%d %H:%M:%S %Z}: "
            f"see what it is at, and if it will not end, `flotilla release {name} --reason …`",
        )


def two_holders(overlaps: Sequence[tuple[Any, ...]]) -> Iterator[Anomaly]:
    for name, token, instance, other_token, other, since in overlaps:
        yield Anomaly(
            "two_holders",
            name,
            since,
            f"{other} was let in with the token {other_token} while {instance} still acted as its holder with the "
            f"token {token}: what is guarded by it is in order all the same; see what else both of them did",
        )
