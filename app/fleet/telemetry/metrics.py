"""Every metric of the fleet: its name, what it is, and what it means. The edge fills them in at a scrape.

HTTP metrics and traces come from FastAPI's own telemetry and are not repeated here. One process is one target: with
`uvicorn --workers` each scrape meets one worker, which is one reason not to run several in a container.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

# A value, or one for each combination of label values.
Value: TypeAlias = float | Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class Definition:
    name: str
    kind: Literal["gauge", "counter"]
    meaning: str
    labels: tuple[str, ...] = ()


DEFINITIONS = (
    Definition("flotilla_instance", "gauge", "Always 1; says who this is", ("namespace", "name", "version")),
    Definition("flotilla_ready", "gauge", "1 while this instance is neither starting nor draining"),
    Definition("flotilla_link_up", "gauge", "1 while the presence lock is certainly held"),
    Definition("flotilla_link_breaks_total", "counter", "How often the link broke"),
    Definition("flotilla_link_relinks_total", "counter", "How often it was taken up again under the same id"),
    Definition("flotilla_link_beat_seconds", "gauge", "How long PostgreSQL took to answer the last heartbeat"),
    Definition("flotilla_identities_lost_total", "counter", "How often this instance was declared gone while it lived"),
    Definition("flotilla_leader", "gauge", "1 while this instance leads; the sum over all instances should be 1"),
    Definition("flotilla_leader_terms_total", "counter", "How often this instance became leader"),
    Definition("flotilla_pool_up", "gauge", "1 while the database answers through the pool"),
    Definition("flotilla_pool_outages_total", "counter", "How often the pool lost the database"),
    Definition("flotilla_pool_connections", "gauge", "Connections of the pool", ("state",)),
    Definition("flotilla_pool_waiting", "gauge", "Requests waiting for a connection"),
    Definition(
        "flotilla_pool_oldest_out_seconds", "gauge", "How long the connection borrowed first has been out of the pool"
    ),
    Definition("flotilla_pool_refused_total", "counter", "Requests that got no connection in time"),
    Definition("flotilla_runs_running", "gauge", "Attempts under way on this instance"),
    Definition("flotilla_runs_claimed_total", "counter", "Attempts this instance began"),
    Definition("flotilla_runs_ended_total", "counter", "How its attempts ended, durably", ("outcome",)),
    Definition(
        "flotilla_runs_fenced_total", "counter", "Writes refused because their token was out of date", ("write",)
    ),
    Definition("flotilla_runs_abandoned_total", "counter", "Attempts written off because they ignored their end"),
    Definition("flotilla_runs_oldest_wait_seconds", "gauge", "How long the run that waits longest has been due"),
    Definition("flotilla_slots_scheduled_total", "counter", "Slots this instance made runs of"),
    Definition("flotilla_runs_pruned_total", "counter", "Runs this instance deleted because their retention was over"),
    Definition(
        "flotilla_runs_prune_skipped", "gauge", "Runs this instance could not delete in time, and will try again"
    ),
    Definition("flotilla_streams", "gauge", "Streams of events that are open"),
    Definition("flotilla_streams_followed_runs", "gauge", "Runs that somebody follows at this instance"),
    Definition("flotilla_streams_reads_total", "counter", "Reads for all who follow something here"),
    Definition("flotilla_streams_notifications_total", "counter", "Notifications sent for those who follow, anywhere"),
    Definition("flotilla_anomalies", "gauge", "What should not be, as of the leader's last look", ("kind",)),
    Definition("flotilla_locks_held", "gauge", "Locks held on this instance, those of its singletons included"),
    Definition("flotilla_locks_waiting", "gauge", "Those who wait for a lock on this instance"),
    Definition("flotilla_locks_taken_total", "counter", "Locks this instance was given"),
    Definition("flotilla_locks_lost_total", "counter", "Locks it lost while they were held"),
    Definition("flotilla_locks_refused_total", "counter", "Transactions refused because their lock was lost"),
    Definition("flotilla_limit_permits_total", "counter", "Permits of a limit that were used here", ("name",)),
    Definition("flotilla_limit_refused_total", "counter", "Those who were refused a permit here", ("name",)),
    Definition("flotilla_limit_waiting", "gauge", "Those who wait for a permit here", ("name",)),
    Definition(
        "flotilla_breaker_open", "gauge", "1 for a breaker that is not closed, as far as is known here", ("name",)
    ),
    Definition("flotilla_breaker_opened_total", "counter", "How often this instance opened a breaker", ("name",)),
    Definition("flotilla_breaker_closed_total", "counter", "How often its probe closed one", ("name",)),
    Definition("flotilla_breaker_refused_total", "counter", "Those who were not let in here", ("name",)),
    Definition("flotilla_requests_in_flight", "gauge", "HTTP requests being answered, streams included"),
    Definition("flotilla_keys_refused_total", "counter", "Requests refused because of their API key", ("reason",)),
    Definition(
        "flotilla_requests_abandoned_total", "counter", "Requests whose client left before the whole body had arrived"
    ),
    Definition("flotilla_connections", "gauge", "Client connections that are open"),
    Definition("flotilla_connections_limit", "gauge", "How many client connections may be open"),
    Definition("flotilla_connections_closed_total", "counter", "Connections closed because of a limit", ("reason",)),
    Definition("flotilla_shutdown_step_seconds", "gauge", "How long a step of the shutdown took", ("step",)),
)

# How many names that people choose are shown by themselves, and as what all others are.
NAMES_MOST = 100
OTHERS = "(others)"


class ByName(Counter[str]):
    """Counts by names that people choose. A name for each customer must not make a series for each."""

    def add(self, name: str, many: int = 1) -> None:
        self[name if name in self or len(self) < NAMES_MOST else OTHERS] += many

    def labelled(self) -> Mapping[tuple[str, ...], float]:
        return {(name,): count for name, count in self.items()}


class Figures(Collector):
    """Asks for the values at each scrape, so that nothing has to be kept up to date in between."""

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}

    def collect(self) -> Iterator[Metric]:
        for definition in DEFINITIONS:
            value = self._values.get(definition.name)
            if value is None:
                continue
            family = (CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily)(
                definition.name, definition.meaning, labels=definition.labels
            )
            samples = value if isinstance(value, Mapping) else {(): value}
            for labels, sample in samples.items():
                family.add_metric(labels, sample)
            yield family

    def fill(self, values: Mapping[str, Value]) -> CollectorRegistry:
        """Return a registry with just these values."""
        self._values = dict(values)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry
