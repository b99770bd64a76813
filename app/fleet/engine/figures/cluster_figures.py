"""Figures of the whole cluster for `GET /metrics`: any instance serves them, whatever its role.

They are read when somebody asks, at most once in `MAX_AGE`, however many ask. If the database does not answer in time,
or its role may not read the view, there are no figures: the scrape has only the metrics of the instance itself, and the
log says why.

A run is runnable if an instance with a free slot could claim it now. The view `runnable_runs` has them, which the
autoscaler's view `worker_backlog` uses too. These are not runnable: a run that is due later, of a paused action, of an
action that no ready instance of role `all` or `worker` has in its code, behind the first unfinished run of its ordering
key, or beyond the `concurrency` of its action. A `rate` is not considered.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
from prometheus_client.core import GaugeMetricFamily, Metric

from app.fleet.cluster import anomalies
from app.fleet.cluster.anomalies import ALLOWED_CONNECTIONS, Anomalies, Anomaly
from app.fleet.cluster.member import Member
from app.fleet.cluster.registry import Instance
from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Database
from app.fleet.errors import DatabaseError
from app.fleet.telemetry.logs import event_log
from app.fleet.telemetry.metrics import MAX_NAMES, OTHERS
from app.fleet.telemetry.redaction import describe

MAX_AGE = 1.0
TIMEOUT = 2.0
LIMIT_TIME = Statement("SELECT set_config('statement_timeout', '1000', true)")

log = event_log(__name__)

RUNNABLE = Statement("SELECT name, runs, oldest_seconds FROM {schema}.runnable_runs ORDER BY name")


@dataclass(frozen=True)
class Figures:
    instances: list[Instance]
    anomalies: list[Anomaly]
    # For each action that is neither paused nor without a worker: its runnable runs, and the age of the oldest one.
    runnable: list[tuple[str, int, float]]
    allowed_connections: int

    def collect(self) -> Iterator[Metric]:
        live = [each for each in self.instances if each.live]
        yield by_labels(
            "flotilla_cluster_instances",
            "Living instances",
            Counter((each.role, each.state) for each in live),
            ("role", "state"),
        )
        yield gauge("flotilla_cluster_leaders", "1 if there is a leader", sum(each.leader for each in live))
        kinds = Counter(each.kind for each in self.anomalies)
        yield by_labels(
            "flotilla_cluster_anomalies", "Anomalies", {(kind,): kinds[kind] for kind in anomalies.KINDS}, ("kind",)
        )
        needed = sum(each.connections for each in live)
        yield gauge("flotilla_cluster_connections", "Sessions that all living instances may open", needed)
        yield gauge("flotilla_cluster_connections_allowed", "Sessions that the server allows", self.allowed_connections)
        runs: Counter[tuple[str, ...]] = Counter()
        oldest: dict[tuple[str, ...], float] = {}
        for number, (name, many, seconds) in enumerate(self.runnable):
            label = (name if number < MAX_NAMES else OTHERS,)
            runs[label] += many
            oldest[label] = max(seconds, oldest.get(label, 0.0))
        yield by_labels("flotilla_cluster_runnable_runs", "Runs that could begin now", runs, ("action",))
        yield by_labels(
            "flotilla_cluster_oldest_runnable_seconds", "For how long the oldest of them is due", oldest, ("action",)
        )


class ClusterFigures:
    def __init__(self, database: Database, member: Member, found: Anomalies) -> None:
        self.reads = 0
        self._database = database
        self._member = member
        self._anomalies = found
        self._figures: Figures | None = None
        self._read_at: float | None = None
        self._failing = False
        self._lock = asyncio.Lock()

    async def read(self) -> Figures | None:
        """Return the figures, at most `MAX_AGE` old; None while the database does not answer."""
        async with self._lock:
            loop = asyncio.get_running_loop()
            if self._read_at is None or loop.time() - self._read_at >= MAX_AGE:
                self._figures = await self._read()
                self._read_at = loop.time()
        return self._figures

    async def _read(self) -> Figures | None:
        self.reads += 1
        try:
            async with asyncio.timeout(TIMEOUT):
                instances = await self._member.instances()
                found = await self._anomalies.find(instances)
                async with self._database.connection() as connection:
                    await connection.execute(LIMIT_TIME)
                    ((allowed,),) = await (await connection.execute(ALLOWED_CONNECTIONS)).fetchall()
                    runnable = await (await connection.execute(self._database.namespace.sql(RUNNABLE))).fetchall()
        except (psycopg.Error, DatabaseError, TimeoutError) as error:
            if not self._failing:
                log.warning("figures.failed", reason=describe(error))
            self._failing = True
            return None
        self._failing = False
        return Figures(instances, found, runnable, allowed)


def gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value)


def by_labels(
    name: str, meaning: str, values: "Counter[tuple[str, ...]] | dict[tuple[str, ...], float]", labels: tuple[str, ...]
) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=labels)
    for each, value in values.items():
        family.add_metric(each, value)
    return family
