"""What should not be, although nothing is broken yet: found by looking, told with what to do.

    kind                subject        means
    heartbeat_late      an instance    its session lives, but it has not said so for a while
    clock_difference    an instance    its machine's clock and PostgreSQL's are apart
    no_leader           the namespace  living instances, and nobody leads
    leader_flapping     the namespace  leaders lose their leadership again and again; those that leave in order do not
                                       count
    connection_budget   the database   the living could together open more sessions than the server allows
    lock_held_long      a lock         it has been held for longer than a lock should be (singletons' excepted)
    two_holders         a lock         somebody was let in while its holder still acted as such: it must never happen
    run_stuck           a run          its deadline is long over, and nobody has taken it back (`rescuer.py`)
    once_pending        a scope        keys have been pending for too long, and their owners live (`once.py`)
    connection_not_returned  an instance  a connection of its pool is out for longer than any transaction should last

Each is in `GET /health/instances`, which looks when it is asked. The leader looks now and then by itself: for the log,
where each is said once when it comes and once when it is over, and for a metric. Each kind has a page in docs/runbook.

A check only reads, and takes no part in keeping anything safe. Rooms above add theirs (`Anomalies.add`).
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import psycopg

from app.fleet.background import Service, cancel_and_wait
from app.fleet.cluster.member import Member
from app.fleet.cluster.registry import Instance
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Connection, Database
from app.fleet.errors import DatabaseError
from app.fleet.telemetry.logs import events

KINDS = (
    "heartbeat_late",
    "clock_difference",
    "no_leader",
    "leader_flapping",
    "connection_budget",
    "lock_held_long",
    "two_holders",
    "run_stuck",
    "once_pending",
    "connection_not_returned",
)
EVERY = 30.0
AFTER_DEFECT = 5.0
LATE_MS = 3000
APART = 2.0
# So many terms of leadership in so long that ended although the leader was to go on.
FLAPS = 5
FLAPPING = timedelta(minutes=10)

log = events(__name__)

ALLOWED_CONNECTIONS = Statement("""
SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
""")

# The terms that ended, but for those that an instance ended itself because it leaves: the last term of one that drains
# or has left.
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
  AND NOT (
      t.last
      AND EXISTS (
          SELECT FROM {schema}.instances AS i
          WHERE i.id = t.instance_id AND (i.state = 'draining' OR i.gone_reason = 'left')
      )
  )
""")


@dataclass(frozen=True)
class Anomaly:
    kind: str
    subject: str
    since: datetime
    detail: str


# Looks with this connection, and is told of the living instances.
Check = Callable[[Connection, Namespace, Sequence[Instance]], Awaitable[Iterable[Anomaly]]]


class Anomalies(Service):
    """What is looked for in this namespace, and what this instance found last, if it leads."""

    name = "anomalies"

    def __init__(self, database: Database, member: Member) -> None:
        super().__init__()
        self._database = database
        self._member = member
        self._checks: list[Check] = [of_instances, of_leadership]
        self._known: dict[tuple[str, str], Anomaly] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, check: Check) -> None:
        self._checks.append(check)

    @property
    def counts(self) -> Counter[str]:
        """How many of each kind there were when this instance looked last; none, if it does not lead."""
        return Counter(kind for kind, _ in self._known)

    async def find(self, instances: Sequence[Instance]) -> list[Anomaly]:
        """Look for everything, now."""
        living = [instance for instance in instances if instance.living]
        async with self._database.autocommit() as connection:
            found = [await check(connection, self._database.namespace, living) for check in self._checks]
        return [anomaly for each in found for anomaly in each]

    async def look(self) -> None:
        """Look, and say what is new and what is over."""
        found = {(each.kind, each.subject): each for each in await self.find(await self._member.instances())}
        for key, anomaly in found.items():
            if key not in self._known:
                log.warning("anomaly.found", kind=anomaly.kind, subject=anomaly.subject, detail=anomaly.detail)
        for kind, subject in self._known.keys() - found.keys():
            log.info("anomaly.over", kind=kind, subject=subject)
        self._known = found

    async def _start(self) -> None:
        self._task = asyncio.create_task(self._look_for_ever(), name="anomalies")

    async def _stop(self) -> None:
        await cancel_and_wait(self._task)

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(EVERY * random.uniform(0.75, 1.25))
            try:
                if self._member.leading:
                    await self.look()
                else:
                    self._known = {}
            except (psycopg.Error, DatabaseError) as error:
                log.debug("anomalies.failed", reason=" ".join(str(error).split()))
            except Exception as error:  # noqa: BLE001 — a defect of ours must not end it for good
                log.error("cluster.defect", error=error, service="anomalies")
                await asyncio.sleep(AFTER_DEFECT)


# -- the checks of this room ------------------------------------------------------------------------------------------


async def of_instances(connection: Connection, _: Namespace, living: Sequence[Instance]) -> Iterable[Anomaly]:
    row = await (await connection.execute(ALLOWED_CONNECTIONS)).fetchone()
    assert row is not None
    return [*late(living), *apart(living), *over_budget(living, int(row[0])), *not_returned(living)]


async def of_leadership(connection: Connection, namespace: Namespace, living: Sequence[Instance]) -> Iterable[Anomaly]:
    row = await (await connection.execute(namespace.sql(LOST_TERMS), {"within": FLAPPING})).fetchone()
    assert row is not None
    return [*leaderless(namespace.name, living), *flapping(namespace.name, *row)]


def apart(living: Sequence[Instance]) -> Iterator[Anomaly]:
    for instance in living:
        if instance.clock_ahead is not None and abs(instance.clock_ahead) > APART:
            way = "ahead of" if instance.clock_ahead > 0 else "behind"
            yield Anomaly(
                "clock_difference",
                instance.name,
                instance.started_at,
                f"the clock of {instance.hostname} is {abs(instance.clock_ahead):.1f} s {way} PostgreSQL's: the fleet "
                f"goes by PostgreSQL's alone, but logs, certificates and your own code may not; look at its time "
                f"synchronisation",
            )


def flapping(namespace: str, terms: int, since: datetime, names: str) -> Iterator[Anomaly]:
    if terms >= FLAPS:
        yield Anomaly(
            "leader_flapping",
            namespace,
            since,
            f"{terms} terms of leadership within {FLAPPING.total_seconds() / 60:.0f} minutes ended although their "
            f"leader was not leaving ({names}): sessions end again and again; see why in these instances' logs",
        )


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


def not_returned(living: Sequence[Instance]) -> Iterator[Anomaly]:
    for instance in living:
        if (seconds := instance.connection_out_seconds) is not None:
            yield Anomaly(
                "connection_not_returned",
                instance.name,
                instance.heartbeat_at - timedelta(seconds=seconds),
                f"a connection of its pool has been out for {seconds:.0f} s, longer than any transaction should last: "
                f"code that holds a session open, or a connection that is never given back; when all are out, this "
                f"instance answers 503",
            )
