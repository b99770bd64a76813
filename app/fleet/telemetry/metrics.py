"""Every metric of the fleet: its name, its type and its meaning. `GET /metrics` fills in the values at each scrape.

HTTP metrics and traces come from FastAPI's own telemetry and are not repeated here. One process is one target: with
`uvicorn --workers`, each scrape reaches one of the workers. So run one worker per container.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# One value, or a value for each combination of label values.
Value: TypeAlias = float | Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class Definition:
    kind: Literal["gauge", "counter"]
    name: str
    meaning: str
    labels: tuple[str, ...] = ()


gauge = partial(Definition, "gauge")
counter = partial(Definition, "counter")

DEFINITIONS = (
    gauge("flotilla_instance", "Always 1; its labels identify the instance", ("namespace", "name", "version")),
    gauge("flotilla_ready", "1 while this instance is neither starting nor draining"),
    gauge("flotilla_link_up", "1 while the link certainly holds the presence lock"),
    counter("flotilla_link_breaks_total", "How often the link broke"),
    counter("flotilla_link_relinks_total", "How often the link was restored with the same instance id"),
    gauge("flotilla_link_beat_seconds", "How long PostgreSQL took to answer the last heartbeat"),
    counter("flotilla_identities_lost_total", "How often this instance was declared gone while it lived"),
    gauge("flotilla_leader", "1 while this instance is the leader; summed over all instances it should be 1"),
    counter("flotilla_leader_terms_total", "How often this instance became leader"),
    gauge("flotilla_pool_up", "1 while the database answers through the pool"),
    counter("flotilla_pool_outages_total", "How often the pool lost the database"),
    gauge("flotilla_pool_connections", "Connections of the pool", ("state",)),
    gauge("flotilla_pool_waiting", "Requests that wait for a connection of the pool"),
    gauge("flotilla_pool_oldest_out_seconds", "How long the longest-borrowed connection has been borrowed"),
    counter("flotilla_pool_refused_total", "Requests that got no connection of the pool in time"),
    gauge("flotilla_runs_running", "Attempts that this instance executes now"),
    counter("flotilla_runs_claimed_total", "Attempts that this instance began"),
    counter("flotilla_runs_ended_total", "Attempts of this instance that ended and are committed", ("outcome",)),
    counter("flotilla_runs_fenced_total", "Writes that were rejected for an outdated fencing token", ("write",)),
    counter("flotilla_runs_abandoned_total", "Attempts that did not stop when cancelled, and are ignored since"),
    gauge("flotilla_runs_oldest_wait_seconds", "How long the longest-waiting run has been due"),
    counter("flotilla_slots_scheduled_total", "Slots for which this instance inserted runs"),
    counter("flotilla_runs_pruned_total", "Runs that this instance deleted after their retention"),
    gauge("flotilla_runs_prune_skipped", "Runs that this instance could not delete in time, and will try again"),
    gauge("flotilla_streams", "Event streams that are open"),
    gauge("flotilla_streams_followed_runs", "Runs that clients or code follow at this instance"),
    counter("flotilla_streams_reads_total", "Reads of events and of the feed, for all followers together"),
    counter("flotilla_streams_notifications_total", "Notifications sent to followers on any instance"),
    gauge("flotilla_anomalies", "Anomalies that the leader found at its last check", ("kind",)),
    gauge("flotilla_locks_held", "Locks that this instance holds, including the locks of its singletons"),
    gauge("flotilla_locks_waiting", "Tasks of this instance that wait for a lock"),
    counter("flotilla_locks_taken_total", "Locks that this instance acquired"),
    counter("flotilla_locks_lost_total", "Locks that this instance lost while it held them"),
    counter("flotilla_locks_refused_total", "Transactions that were refused because their lock was lost"),
    counter("flotilla_limit_permits_total", "Permits of a limit that this instance used", ("name",)),
    counter("flotilla_limit_refused_total", "Calls on this instance that got no permit in time", ("name",)),
    gauge("flotilla_limit_waiting", "Calls on this instance that wait for a permit", ("name",)),
    gauge("flotilla_breaker_open", "1 for a breaker that is not closed, as far as this instance knows", ("name",)),
    counter("flotilla_breaker_opened_total", "How often this instance opened a breaker", ("name",)),
    counter("flotilla_breaker_closed_total", "How often a probe of this instance closed a breaker", ("name",)),
    counter("flotilla_breaker_refused_total", "Calls on this instance that a breaker refused", ("name",)),
    gauge("flotilla_requests_in_flight", "HTTP requests being answered, including event streams"),
    counter("flotilla_keys_refused_total", "Requests that were refused for their API key", ("reason",)),
    counter("flotilla_requests_abandoned_total", "Requests whose client left before the whole body had arrived"),
    gauge("flotilla_connections", "Client connections that are open"),
    gauge("flotilla_connections_limit", "How many client connections may be open"),
    counter("flotilla_connections_closed_total", "Connections closed because of a limit", ("reason",)),
    gauge("flotilla_shutdown_step_seconds", "How long a step of the shutdown took", ("step",)),
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
