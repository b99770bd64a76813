"""What should not be, although nothing is broken yet: found by looking, told with what to do.

Each kind has a page in docs/runbook. A check only reads, and takes no part in keeping anything safe.

    kind                subject        means
    heartbeat_late      an instance    its session lives, but it has not said so for a while
    no_leader           the namespace  living instances, and nobody leads
    connection_budget   the database   the living could together open more sessions than the server allows
    lock_held_long      a lock         it has been held for longer than a lock should be (singletons' excepted)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from app.fleet.cluster.registry import Instance
from app.fleet.cluster.singletons import RESERVED
from app.fleet.db.pool import Database

LATE_MS = 3000
KINDS = ("heartbeat_late", "no_leader", "connection_budget", "lock_held_long")
HELD_LONG = timedelta(minutes=10)

ALLOWED_CONNECTIONS = """
SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
"""

HELD_TOO_LONG = """
SELECT name, instance, holder, acquired_at
FROM {schema}.service_locks
WHERE instance_id IS NOT NULL AND acquired_at < clock_timestamp() - %(long)s AND NOT starts_with(name, %(but)s)
ORDER BY acquired_at
LIMIT 100
"""


@dataclass(frozen=True)
class Anomaly:
    kind: str
    subject: str
    since: datetime
    detail: str


async def find_anomalies(database: Database, instances: Sequence[Instance]) -> list[Anomaly]:
    async with database.connection() as connection:
        row = await (await connection.execute(ALLOWED_CONNECTIONS)).fetchone()
        values = {"long": HELD_LONG, "but": RESERVED}
        locks = await (await connection.execute(database.namespace.sql(HELD_TOO_LONG), values)).fetchall()
    assert row is not None
    living = [instance for instance in instances if instance.living]
    return [
        *late(living),
        *leaderless(database.namespace.name, living),
        *over_budget(living, int(row[0])),
        *held_long(locks),
    ]


def late(living: Sequence[Instance]) -> Iterator[Anomaly]:
    for instance in living:
        if instance.heartbeat_age_ms > LATE_MS:
            yield Anomaly(
                "heartbeat_late",
                instance.name,
                instance.heartbeat_at,
                f"its last heartbeat is {instance.heartbeat_age_ms} ms old, and it should beat every second: it is "
                f"frozen, cut off, or starved of CPU; the server ends its session after 5 s of silence",
            )


def leaderless(namespace: str, living: Sequence[Instance]) -> Iterator[Anomaly]:
    candidates = [instance for instance in living if instance.state != "draining"]
    if candidates and not any(instance.leader for instance in living):
        yield Anomaly(
            "no_leader",
            namespace,
            max(instance.heartbeat_at for instance in candidates),
            "nobody leads, so the dead are not declared gone; normal for a moment after a restart of the database, "
            "otherwise look for what holds the lock on the view leader_turn in pg_locks",
        )


def over_budget(living: Sequence[Instance], allowed: int) -> Iterator[Anomaly]:
    wanted = sum(instance.connections for instance in living)
    if wanted > allowed:
        yield Anomaly(
            "connection_budget",
            "max_connections",
            max(instance.started_at for instance in living),
            f"{len(living)} living instances may open {wanted} sessions, and the server allows {allowed}: lower "
            f"FLOTILLA_POOL_MAX, run fewer instances, raise max_connections, or put a pooler in front of DATABASE_URL",
        )


def held_long(locks: Sequence[tuple[Any, ...]]) -> Iterator[Anomaly]:
    for name, instance, holder, since in locks:
        yield Anomaly(
            "lock_held_long",
            name,
            since,
            f"{instance} has held this lock{f' for {holder}' if holder else ''} since {since:%Y-%m-%d %H:%M:%S %Z}: "
            f"see what it is at, and if it will not end, `flotilla release {name} --reason …`",
        )
