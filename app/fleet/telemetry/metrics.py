"""Every metric of the fleet: its name, its type and its meaning. `GET /metrics` fills in the values at each scrape.

HTTP metrics and traces come from FastAPI's own telemetry and are not repeated here. One process is one target: with
`uvicorn --workers`, each scrape reaches one of the workers. So run one worker per container.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# One value, or a value for each combination of label values.
Value: TypeAlias = float | Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class Definition:
    name: str
    kind: Literal["gauge", "counter"]
    meaning: str
    labels: tuple[str, ...] = ()


DEFINITIONS = (
    Definition(
        "flotilla_instance", "gauge", "Always 1; its labels identify the instance", ("namespace", "name", "version")
    ),
    Definition("flotilla_ready", "gauge", "1 while this instance is neither starting nor draining"),
    Definition("flotilla_link_up", "gauge", "1 while the link certainly holds the presence lock"),
    Definition("flotilla_link_breaks_total", "counter", "How often the link broke"),
    Definition("flotilla_link_relinks_total", "counter", "How often the link was restored with the same instance id"),
    Definition("flotilla_link_beat_seconds", "gauge", "How long PostgreSQL took to answer the last heartbeat"),
    Definition("flotilla_identities_lost_total", "counter", "How often this instance was declared gone while it lived"),
    Definition(
        "flotilla_leader", "gauge", "1 while this instance is the leader; summed over all instances it should be 1"
    ),
    Definition("flotilla_leader_terms_total", "counter", "How often this instance became leader"),
    Definition("flotilla_pool_up", "gauge", "1 while the database answers through the pool"),
    Definition("flotilla_pool_outages_total", "counter", "How often the pool lost the database"),
    Definition("flotilla_pool_connections", "gauge", "Connections of the pool", ("state",)),
    Definition("flotilla_pool_waiting", "gauge", "Requests that wait for a connection of the pool"),
    Definition(
        "flotilla_pool_oldest_out_seconds", "gauge", "How long the longest-borrowed connection has been borrowed"
    ),
    Definition("flotilla_pool_refused_total", "counter", "Requests that got no connection of the pool in time"),
    Definition("flotilla_runs_running", "gauge", "Attempts that this instance executes now"),
    Definition("flotilla_runs_claimed_total", "counter", "Attempts that this instance began"),
    Definition(
        "flotilla_runs_ended_total", "counter", "Attempts of this instance that ended and are committed", ("outcome",)
    ),
    Definition(
        "flotilla_runs_fenced_total", "counter", "Writes that were rejected for an outdated fencing token", ("write",)
    ),
    Definition(
        "flotilla_runs_abandoned_total", "counter", "Attempts that did not stop when cancelled, and are ignored since"
    ),
    Definition("flotilla_runs_oldest_wait_seconds", "gauge", "How long the longest-waiting run has been due"),
    Definition("flotilla_slots_scheduled_total", "counter", "Slots for which this instance inserted runs"),
    Definition("flotilla_runs_pruned_total", "counter", "Runs that this instance deleted after their retention"),
    Definition(
        "flotilla_runs_prune_skipped", "gauge", "Runs that this instance could not delete in time, and will try again"
    ),
    Definition("flotilla_streams", "gauge", "Event streams that are open"),
    Definition("flotilla_streams_followed_runs", "gauge", "Runs that clients or code follow at this instance"),
    Definition(
        "flotilla_streams_reads_total", "counter", "Reads of events and of the feed, for all followers together"
    ),
    Definition("flotilla_streams_notifications_total", "counter", "Notifications sent to followers on any instance"),
    Definition("flotilla_anomalies", "gauge", "Anomalies that the leader found at its last check", ("kind",)),
    Definition("flotilla_locks_held", "gauge", "Locks that this instance holds, including the locks of its singletons"),
    Definition("flotilla_locks_waiting", "gauge", "Tasks of this instance that wait for a lock"),
    Definition("flotilla_locks_taken_total", "counter", "Locks that this instance acquired"),
    Definition("flotilla_locks_lost_total", "counter", "Locks that this instance lost while it held them"),
    Definition("flotilla_locks_refused_total", "counter", "Transactions that were refused because their lock was lost"),
    Definition("flotilla_limit_permits_total", "counter", "Permits of a limit that this instance used", ("name",)),
    Definition(
        "flotilla_limit_refused_total", "counter", "Calls on this instance that got no permit in time", ("name",)
    ),
    Definition("flotilla_limit_waiting", "gauge", "Calls on this instance that wait for a permit", ("name",)),
    Definition(
        "flotilla_breaker_open", "gauge", "1 for a breaker that is not closed, as far as this instance knows", ("name",)
    ),
    Definition("flotilla_breaker_opened_total", "counter", "How often this instance opened a breaker", ("name",)),
    Definition(
        "flotilla_breaker_closed_total", "counter", "How often a probe of this instance closed a breaker", ("name",)
    ),
    Definition("flotilla_breaker_refused_total", "counter", "Calls on this instance that a breaker refused", ("name",)),
    Definition("flotilla_requests_in_flight", "gauge", "HTTP requests being answered, including event streams"),
    Definition("flotilla_keys_refused_total", "counter", "Requests that were refused for their API key", ("reason",)),
    Definition(
        "flotilla_requests_abandoned_total", "counter", "Requests whose client left before the whole body had arrived"
    ),
    Definition("flotilla_connections", "gauge", "Client connections that are open"),
    Definition("flotilla_connections_limit", "gauge", "How many client connections may be open"),
    Definition("flotilla_connections_closed_total", "counter", "Connections closed because of a limit", ("reason",)),
    Definition("flotilla_shutdown_step_seconds", "gauge", "How long a step of the shutdown took", ("step",)),
)

# So many names of limits and breakers have their own series; all further names share the series `OTHERS`.
MAX_NAMES = 100
OTHERS = "(others)"


class ByName(Counter[str]):
    """Counts for names that users choose. The number of series is bounded, even with a name for each customer."""

    def add(self, name: str, many: int = 1) -> None:
        self[name if name in self or len(self) < MAX_NAMES else OTHERS] += many

    def labelled(self) -> Mapping[tuple[str, ...], float]:
        return {(name,): count for name, count in self.items()}


class FleetCollector(Collector):
    """Turns values into metrics. Each definition must have a value: without one, the scrape fails."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = values

    def collect(self) -> Iterator[Metric]:
        for definition in DEFINITIONS:
            family = (CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily)(
                definition.name, definition.meaning, labels=definition.labels
            )
            value = self._values[definition.name]
            samples = value if isinstance(value, Mapping) else {(): value}
            for labels, sample in samples.items():
                family.add_metric(labels, sample)
            yield family
