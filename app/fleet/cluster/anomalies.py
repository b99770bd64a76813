"""What should not be, although nothing is broken yet: found by looking, told with what to do.

Each kind has a page in docs/runbook. A check reads the register and the server's settings and nothing else; it takes
no part in keeping anything safe.

    kind                subject        means
    heartbeat_late      an instance    its session lives, but it has not said so for a while
    no_leader           the namespace  living instances, and nobody leads
    connection_budget   the database   the living could together open more sessions than the server allows
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from app.fleet.cluster.registry import Instance
from app.fleet.db.pool import Database

LATE_MS = 3000
KINDS = ("heartbeat_late", "no_leader", "connection_budget")

ALLOWED_CONNECTIONS = """
SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
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
    assert row is not None
    living = [instance for instance in instances if instance.living]
    return [*late(living), *leaderless(database.namespace.name, living), *over_budget(living, int(row[0]))]


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
