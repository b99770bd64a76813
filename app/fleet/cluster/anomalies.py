"""Anomalies: states that should not occur although nothing has failed yet, each with what to do about it.

    kind                     subject        meaning
    heartbeat_late           an instance    its presence lock is held, but its last heartbeat is late
    clock_difference         an instance    its machine's clock differs from PostgreSQL's
    no_leader                the namespace  there are live instances and no leader
    leader_flapping          the namespace  leaders lose their sessions repeatedly; orderly shutdowns do not count
    connection_budget        the database   all live instances together may open more sessions than the server allows
    lock_held_long           a lock         it is held for longer than a lock should be (except singletons' locks)
    two_holders              a lock         a second holder got it while the first still acted as its holder: a bug
    no_worker                an action      runs of it are due, and no living instance executes it (`no_worker.py`)
    run_stuck                a run          its deadline passed long ago, and it was not rescued (`rescuer.py`)
    once_pending             a scope        keys have been pending for too long, and their owners are live (`once.py`)
    connection_not_returned  an instance    a connection of its pool is borrowed longer than a transaction should take

`GET /health/instances` and `GET /metrics` run all checks and show what they find. The leader runs them periodically: it
logs each anomaly once when it appears and once when it is over. Each kind has a page in docs/runbook.

A check only reads; no safety depends on it. Rooms above add their checks with `Anomalies.add`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from app.fleet.background import LoopErrors, LoopService, jittered
from app.fleet.cluster.member import Member
from app.fleet.cluster.registry import Instance
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection, Database
from app.fleet.telemetry.logs import event_log

KINDS = (
    "heartbeat_late",
    "clock_difference",
    "no_leader",
    "leader_flapping",
    "connection_budget",
    "lock_held_long",
    "two_holders",
    "no_worker",
    "run_stuck",
    "once_pending",
    "connection_not_returned",
)
CHECK_INTERVAL = 30.0
LATE_HEARTBEAT_MS = 3000
MAX_CLOCK_DIFFERENCE = 2.0
# Leadership is flapping if this many terms within this window ended although the leader was not shutting down.
FLAPPING_TERMS = 5
FLAPPING_WINDOW = timedelta(minutes=10)

log = event_log(__name__)

ALLOWED_CONNECTIONS = Statement("""
SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
""")

# The terms that ended, except those that their leader ended itself: the last term of an instance that is draining or
# has left, and the terms of role `web`, which end when an instance of another role queues.
LOST_TERMS = Statement("""
SELECT count(*), min(t.began_at), string_agg(DISTINCT t.instance, ', ' ORDER BY t.instance)
FROM (
    SELECT id, instance_id, instance, began_at,
           lead(id) OVER (ORDER BY id) IS NOT NULL AS ended,
           lead(id) OVER (PARTITION BY instance_id ORDER BY id) IS NULL AS last
    FROM {schema}.leader_terms
    WHERE began_at > clock_timestamp() - %(within)s
) AS t
WHERE t.ended
  AND NOT EXISTS (
      SELECT FROM {schema}.instances AS i
      WHERE i.id = t.instance_id
        AND (i.role = 'web' OR (t.last AND (i.state = 'draining' OR i.gone_reason = 'left')))
  )
""")


@dataclass(frozen=True)
class Anomaly:
    kind: str
    subject: str
    since: datetime
    detail: str


# Runs on the connection; receives the live instances.
Check = Callable[[Connection, Namespace, Sequence[Instance]], Awaitable[Iterable[Anomaly]]]


class Anomalies(LoopService):
    """All checks of this namespace."""

    name = "anomalies"

    def __init__(self, database: Database, member: Member) -> None:
        super().__init__()
        self._database = database
        self._member = member
        self._checks: list[Check] = [check_instances, check_leadership]
        # What this instance found at its last check as the leader, by kind and subject.
        self.known: dict[tuple[str, str], Anomaly] = {}
        self._errors = LoopErrors(log, failed="anomalies.failed", defect="cluster.defect", service="anomalies")

    def add(self, check: Check) -> None:
        self._checks.append(check)

    async def find(self, instances: Sequence[Instance]) -> list[Anomaly]:
        """Run all checks now."""
        live = [instance for instance in instances if instance.live]
        async with self._database.autocommit() as connection:
            found = [await check(connection, self._database.namespace, live) for check in self._checks]
        return [anomaly for each in found for anomaly in each]

    async def find_and_log(self) -> None:
        """Run all checks; log what is new and what is over."""
        found = {(each.kind, each.subject): each for each in await self.find(await self._member.instances())}
        for key, anomaly in found.items():
            if key not in self.known:
                log.warning("anomaly.found", kind=anomaly.kind, subject=anomaly.subject, detail=anomaly.detail)
        for kind, subject in self.known.keys() - found.keys():
            log.info("anomaly.over", kind=kind, subject=subject)
        self.known = found

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(jittered(CHECK_INTERVAL))
            async with self._errors.logged():
                if self._member.leading:
                    await self.find_and_log()
                else:
                    self.known = {}


# -- the checks of this package ---------------------------------------------------------------------------------------


async def check_instances(connection: Connection, _: Namespace, live: Sequence[Instance]) -> Iterable[Anomaly]:
    row = await (await connection.execute(ALLOWED_CONNECTIONS)).fetchone()
    assert row is not None
    return [*late_heartbeats(live), *clock_differences(live), *over_budget(live, int(row[0])), *not_returned(live)]


async def check_leadership(connection: Connection, namespace: Namespace, live: Sequence[Instance]) -> Iterable[Anomaly]:
    row = await (await connection.execute(namespace.sql(LOST_TERMS), {"within": FLAPPING_WINDOW})).fetchone()
    assert row is not None
    return [*no_leader(namespace.name, live), *flapping(namespace.name, *row)]


def clock_differences(live: Sequence[Instance]) -> Iterator[Anomaly]:
    for instance in live:
        if instance.clock_ahead is not None and abs(instance.clock_ahead) > MAX_CLOCK_DIFFERENCE:
            direction = "ahead of" if instance.clock_ahead > 0 else "behind"
            yield Anomaly(
                "clock_difference",
                instance.name,
                instance.started_at,
                f"the clock of {instance.hostname} is {abs(instance.clock_ahead):.1f} s {direction} PostgreSQL's: "
                f"Flotilla uses only PostgreSQL's clock, but logs, certificates and your own code may not; "
                f"check its time synchronisation",
            )


def flapping(namespace: str, terms: int, since: datetime, names: str) -> Iterator[Anomaly]:
    if terms >= FLAPPING_TERMS:
        yield Anomaly(
            "leader_flapping",
            namespace,
            since,
            f"{terms} terms of leadership within {FLAPPING_WINDOW.total_seconds() / 60:.0f} minutes ended although "
            f"their leader was not shutting down ({names}): its session ended; see these instances' logs",
        )


def late_heartbeats(live: Sequence[Instance]) -> Iterator[Anomaly]:
    for instance in live:
        if instance.heartbeat_age_ms > LATE_HEARTBEAT_MS:
            yield Anomaly(
                "heartbeat_late",
                instance.name,
                instance.heartbeat_at,
                f"its last heartbeat is {instance.heartbeat_age_ms} ms old, and it should send one every second: it is "
                f"frozen, cut off, or lacks CPU time; the server ends its session after 5 s of silence",
            )


def no_leader(namespace: str, live: Sequence[Instance]) -> Iterator[Anomaly]:
    candidates = [instance for instance in live if instance.state != "draining"]
    if candidates and not any(instance.leader for instance in live):
        yield Anomaly(
            "no_leader",
            namespace,
            max(instance.heartbeat_at for instance in candidates),
            "there is no leader, so no instance is declared gone; this is normal for a moment after a restart of the "
            "database, otherwise find the session that holds the lock on the view leader_turn in pg_locks",
        )


def over_budget(live: Sequence[Instance], allowed: int) -> Iterator[Anomaly]:
    needed = sum(instance.connections for instance in live)
    if needed > allowed:
        yield Anomaly(
            "connection_budget",
            "max_connections",
            max(instance.started_at for instance in live),
            f"{len(live)} live instances may open {needed} sessions, and the server allows {allowed}: lower "
            f"FLOTILLA_POOL_MAX, run fewer instances, raise max_connections, or put a pooler in front of DATABASE_URL",
        )


def not_returned(live: Sequence[Instance]) -> Iterator[Anomaly]:
    for instance in live:
        if (seconds := instance.connection_out_seconds) is not None:
            yield Anomaly(
                "connection_not_returned",
                instance.name,
                instance.heartbeat_at - timedelta(seconds=seconds),
                f"a connection of its pool has been borrowed for {seconds:.0f} s, longer than a transaction should "
                f"take: either code holds a session open, or a connection is never returned; when all connections are "
                f"borrowed, this instance answers 503",
            )
