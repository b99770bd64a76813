"""Traces: one trace holds a request, the runs that it triggers, and the runs that those trigger, on whatever instances.

FastAPI makes the span of a request, and sends all spans to a collector if its environment names one
(docs/guides/traces.md). These are the spans of the fleet, with the attributes of OpenTelemetry's conventions for
messaging:

    span             kind        parent                                        from, to
    create ACTION    producer    what triggers: a request, an attempt          the insert of the runs
    receive          consumer    none; a link for each run                     a claim that found runs
    process ACTION   consumer    the span `create` of the run. A later         the action begins, it returns or raises
                                 attempt also has a link to that span, with
                                 its number and why there was another one
    settle ACTION    internal    the span `process`                            the action has ended, that is durable
    commit           internal    the span `process`                            the block of `run.commit`
    lock, limit      internal    the caller's                                  a wait for a lock or a permit

The run's row keeps the context of the span `create` (`trace_parent`), in the form of the header `traceparent`. A run of
a schedule has none: its first attempt begins a trace.

Without a configured tracer there are no spans: the path of a run then only compares `tracer()` with None, which the
executor does once, when it starts.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app.fleet.telemetry.logs import event_log

HEADER = "traceparent"
SYSTEM = {"messaging.system": "flotilla"}
# So many runs of a claim are linked.
MAX_LINKS = 100

propagator = TraceContextTextMapPropagator()
# The name of this instance.
identity = {"messaging.client.id": ""}
# The places whose error is in the log.
failed: set[str] = set()

log = event_log(__name__)


def set_defaults(service: str) -> None:
    """Set what the environment leaves open, before FastAPI reads it."""
    os.environ.setdefault("OTEL_SERVICE_NAME", service)
    # Seconds. The last spans are sent at the end of the shutdown: a collector that does not answer must not delay it.
    os.environ.setdefault("OTEL_EXPORTER_OTLP_TIMEOUT", "3")


def identify(instance: str) -> None:
    """Give this name to all spans of this process from now on."""
    identity["messaging.client.id"] = instance


def tracer() -> Tracer | None:
    """Return the tracer; None if none is configured."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return provider.get_tracer("flotilla")


def context_of(trace_parent: str | None) -> contexts.Context:
    """Return the context that was stored; an empty one if there is none."""
    return propagator.extract({HEADER: trace_parent} if trace_parent else {}, contexts.Context())


def trace_parent_of(span: Span) -> str | None:
    carrier: dict[str, str] = {}
    propagator.inject(carrier, trace.set_span_in_context(span))
    return carrier.get(HEADER)


def trace_id_of(trace_parent: str | None) -> str | None:
    return trace_parent[3:35] if trace_parent else None


def messaging(action: str, operation: str, kind: str) -> dict[str, Any]:
    """Return the attributes of an operation on runs of an action."""
    return {
        **SYSTEM,
        **identity,
        "messaging.destination.name": action,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
    }


def fail(span: Span, error: BaseException) -> None:
    """Mark a span as failed. The text of the error is not sent: it may have secrets."""
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR))


@contextmanager
def recorded(own: Tracer, name: str, kind: SpanKind, attributes: Mapping[str, Any]) -> Iterator[Span]:
    """Make a span around a block."""
    with own.start_as_current_span(
        name, kind=kind, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except BaseException as error:
            fail(span, error)
            raise


# -- triggering -------------------------------------------------------------------------------------------------------


@contextmanager
def creating(actions: Sequence[str]) -> Iterator[str | None]:
    """Make a span around an insert; yield what the runs' rows keep of it."""
    own = tracer()
    if own is None:
        yield None
        return
    names = sorted(set(actions))
    attributes = messaging(", ".join(names[:10]), "create", "create")
    if len(actions) > 1:
        attributes["messaging.batch.message_count"] = len(actions)
    name = f"create {names[0]}" if len(names) == 1 else "create"
    with recorded(own, name, SpanKind.PRODUCER, attributes) as span:
        yield trace_parent_of(span)


# -- claiming and executing -------------------------------------------------------------------------------------------


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Log an error of the tracer, once for each place: the runs must not depend on a span processor of the service."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 — whatever a processor or an exporter raises
        if what not in failed:
            failed.add(what)
            log.error("tracing.failed", what=what, error=error)


def claimed(own: Tracer, began_ns: int, trace_parents: Sequence[str | None]) -> None:
    """Make the span of a claim that found runs."""
    links = [
        Link(trace.get_current_span(context_of(each)).get_span_context()) for each in trace_parents[:MAX_LINKS] if each
    ]
    attributes: dict[str, Any] = {
        **SYSTEM,
        **identity,
        "messaging.operation.name": "receive",
        "messaging.operation.type": "receive",
        "messaging.batch.message_count": len(trace_parents),
    }
    span = own.start_span(
        "receive",
        contexts.Context(),
        kind=SpanKind.CONSUMER,
        attributes=attributes,
        links=links,
        start_time=began_ns,
    )
    span.end()


def begin_attempt(own: Tracer, action: str, run_id: int, number: int, deaths: int, trace_parent: str | None) -> Span:
    """Begin the span of an attempt, and make it the current one in this task."""
    parent = context_of(trace_parent)
    attributes = messaging(action, "process", "process") | {
        "messaging.message.id": str(run_id),
        "flotilla.attempt": number,
    }
    links = []
    created = trace.get_current_span(parent).get_span_context()
    if number > 1 and created.is_valid:
        # How the earlier attempts ended.
        why = "retry" if not deaths else "takeover" if deaths == number - 1 else "retry, takeover"
        links = [Link(created, {"flotilla.attempt": number, "flotilla.why": why})]
    span = own.start_span(f"process {action}", parent, kind=SpanKind.CONSUMER, attributes=attributes, links=links)
    contexts.attach(trace.set_span_in_context(span))
    return span


def end_attempt(span: Span, error: BaseException | None) -> None:
    if error is not None:
        fail(span, error)
    span.end()


def settled(own: Tracer, span: Span, action: str, ended_ns: int, outcome: str) -> None:
    """Make the span from the end of an action until that was durable."""
    attributes = messaging(action, "settle", "settle") | {"flotilla.outcome": outcome}
    own.start_span(
        f"settle {action}", trace.set_span_in_context(span), attributes=attributes, start_time=ended_ns
    ).end()


# -- waiting ----------------------------------------------------------------------------------------------------------


def spanning(name: str, attributes: Mapping[str, Any]) -> AbstractContextManager[object]:
    """Make a span around a block, if a tracer is configured."""
    own = tracer()
    return nullcontext() if own is None else recorded(own, name, SpanKind.INTERNAL, attributes)
