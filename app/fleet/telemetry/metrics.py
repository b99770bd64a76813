"""The metrics of the fleet: their names, types and meanings. `GET /metrics` returns them.

    kind                     defined                                       filled in
    what this instance is    `DEFINITIONS`                                 at each scrape (`http/metrics.py`)
    what happens now and     instruments of prometheus-client, below       when it happens
    then
    what each run does       `engine/figures/run_metrics.py`               a batch at a time
    the whole cluster        `engine/figures/cluster_figures.py`       at a scrape, at most once a second

The instruments are in prometheus-client's default registry, with the collectors of the process and of the garbage
collector. The scrape returns everything that is there: metrics that a service defines itself need no registration.

One process is one target: with `uvicorn --workers`, each scrape reaches one of the workers. So run one worker per
container.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# So many names that users choose (of actions, limits, breakers) have series of their own; all others share `OTHERS`.
MAX_NAMES = 100
OTHERS = "(others)"
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
    gauge("flotilla_instance", "Always 1; its labels identify the instance", ("namespace", "name", "role", "version")),
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
    counter("flotilla_runs_fenced_total", "Writes that were rejected for an outdated fencing token", ("write",)),
    counter("flotilla_runs_abandoned_total", "Attempts that did not stop when cancelled, and are ignored since"),
    counter("flotilla_slots_scheduled_total", "Slots for which this instance inserted runs"),
    counter("flotilla_runs_pruned_total", "Runs that this instance deleted after their retention"),
    gauge("flotilla_runs_prune_skipped", "Runs that this instance could not delete in time, and will try again"),
    gauge("flotilla_streams", "Event streams that are open"),
    gauge("flotilla_streams_followed_runs", "Runs that clients or code follow at this instance"),
    counter("flotilla_streams_reads_total", "Reads of events and of the feed, for all followers together"),
    counter("flotilla_streams_notifications_total", "Notifications sent to followers on any instance"),
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


# -- instruments ------------------------------------------------------------------------------------------------------

SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
LONG = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800)

LOOP_LAG = Histogram("flotilla_event_loop_lag_seconds", "How late the event loop ran a timer", buckets=SHORT)
POOL_WAIT = Histogram("flotilla_pool_wait_seconds", "How long a caller waited for a connection", buckets=SHORT)
LOCK_WAIT = Histogram("flotilla_lock_wait_seconds", "How long a caller waited for a lock", buckets=LONG)
LOCK_HELD = Histogram("flotilla_lock_held_seconds", "How long a lock was held until its release", buckets=LONG)
TAKEOVER = Histogram(
    "flotilla_takeover_seconds",
    "From when the leader found the session of an instance ended until its runs were pending again",
    buckets=(0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 1, 2.5, 5, 10),
)


# -- what this instance is --------------------------------------------------------------------------------------------


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
