"""`GET /metrics`: the metrics of this instance and of the cluster, for Prometheus (`telemetry/metrics.py`)."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, get_args

from fastapi import APIRouter, Depends, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from app.fleet.edge.auth import needs
from app.fleet.edge.callers.refused_keys import Reason
from app.fleet.edge.context import Context, InContext
from app.fleet.engine.execute.writer import WRITES
from app.fleet.lifecycle import Phase
from app.fleet.server.connections import REASONS
from app.fleet.telemetry.metrics import FleetCollector, Value

router = APIRouter(tags=["metrics"], dependencies=[Depends(needs("read"))])


@router.get("/metrics", response_class=PlainTextResponse)
async def get_metrics(context: InContext) -> Response:
    """Return the metrics of this instance and of the cluster in the text format of Prometheus."""
    figures = await context.engine.figures.read()
    scrape = Scrape(REGISTRY, FleetCollector(values(context)), context.engine.metrics, *filter(None, [figures]))
    return Response(generate_latest(scrape), media_type=CONTENT_TYPE_LATEST)


class Collects(Protocol):
    def collect(self) -> Iterable[Metric]: ...


class Scrape(Collector):
    """All metrics of one response."""

    def __init__(self, *parts: Collects) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        for part in self._parts:
            yield from part.collect()


def values(context: Context) -> Mapping[str, Value]:
    settings, member, database = context.settings, context.member, context.database
    link, pool = member.link, database.stats()
    identity = member.identity
    executor = context.engine.executor
    limits, breakers = context.coordination.limits, context.coordination.breakers
    available = pool.get("pool_available", 0)
    return {
        "flotilla_instance": {
            (settings.namespace, identity.name if identity else "", settings.role.value, context.version): 1
        },
        "flotilla_ready": context.lifecycle.phase is Phase.READY,
        "flotilla_link_up": member.holds(),
        "flotilla_link_breaks_total": link.breaks,
        "flotilla_link_relinks_total": link.relinks,
        "flotilla_link_beat_seconds": link.last_heartbeat_seconds,
        "flotilla_identities_lost_total": link.identities_lost,
        "flotilla_leader": member.leading,
        "flotilla_leader_terms_total": member.leader.terms,
        "flotilla_pool_up": database.healthy,
        "flotilla_pool_outages_total": database.outages,
        "flotilla_pool_connections": {
            ("idle",): available,
            ("in_use",): max(0, pool.get("pool_size", 0) - available),
        },
        "flotilla_pool_waiting": pool.get("requests_waiting", 0),
        "flotilla_pool_oldest_out_seconds": database.longest_borrowed_seconds(),
        "flotilla_pool_refused_total": pool.get("requests_errors", 0),
        "flotilla_runs_running": len(executor.attempts),
        "flotilla_runs_fenced_total": {(write,): executor.writer.fenced[write] for write in WRITES},
        "flotilla_runs_abandoned_total": executor.abandoned,
        "flotilla_slots_scheduled_total": context.engine.scheduler.scheduled,
        "flotilla_runs_pruned_total": context.engine.pruner.pruned,
        "flotilla_runs_prune_skipped": context.engine.pruner.skipped,
        "flotilla_streams": context.open_streams.total(),
        "flotilla_streams_followed_runs": context.stream.hub.followed,
        "flotilla_streams_reads_total": context.stream.hub.reader.reads,
        "flotilla_streams_notifications_total": context.stream.relay.sent,
        "flotilla_locks_held": context.coordination.locks.held,
        "flotilla_locks_waiting": context.coordination.locks.waiting,
        "flotilla_locks_taken_total": context.coordination.locks.taken,
        "flotilla_locks_lost_total": context.coordination.locks.lost,
        "flotilla_locks_refused_total": context.coordination.locks.refused,
        "flotilla_limit_permits_total": limits.permits.labelled(),
        "flotilla_limit_refused_total": limits.refused.labelled(),
        "flotilla_limit_waiting": limits.waiting.labelled(),
        "flotilla_breaker_open": breakers.open.labelled(),
        "flotilla_breaker_opened_total": breakers.opened.labelled(),
        "flotilla_breaker_closed_total": breakers.closed.labelled(),
        "flotilla_breaker_refused_total": breakers.refused.labelled(),
        "flotilla_requests_in_flight": context.in_flight,
        "flotilla_keys_refused_total": {(reason,): context.refused_keys.counts[reason] for reason in get_args(Reason)},
        "flotilla_requests_abandoned_total": context.abandoned,
        "flotilla_connections": context.connections.open,
        "flotilla_connections_limit": context.connections.limit,
        "flotilla_connections_closed_total": {(reason,): context.connections.closed[reason] for reason in REASONS},
        "flotilla_shutdown_step_seconds": {(step,): seconds for step, seconds in context.shutdown_seconds.items()},
    }
