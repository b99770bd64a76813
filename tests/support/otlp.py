"""A collector for tests: it receives the spans that instances send by OTLP over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.postgres import eventually


@dataclass(frozen=True)
class Span:
    name: str
    trace: str
    id: str
    parent: str | None
    attributes: dict[str, Any]
    # The linked spans, with the attributes of each link.
    links: list[tuple[str, dict[str, Any]]]
    failed: bool


@dataclass
class Collector:
    port: int
    spans: list[Span] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Return what switches the traces of an instance on, with a short time until they are sent."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def of_trace(self, trace: str) -> list[Span]:
        return [span for span in list(self.spans) if span.trace == trace]

    def wait_for(self, trace: str, *names: str) -> list[Span]:
        """Wait until the trace has spans with these names, and return its spans."""

        def find() -> list[Span] | None:
            found = self.of_trace(trace)
            return found if {span.name for span in found} >= set(names) else None

        return eventually(find)


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            request = ExportTraceServiceRequest()
            request.ParseFromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    own.spans += [
                        Span(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex() or None,
                            attributes_of(span.attributes),
                            [(link.span_id.hex(), attributes_of(link.attributes)) for link in span.links],
                            span.status.code == span.status.STATUS_CODE_ERROR,
                        )
                        for span in scope.spans
                    ]
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        own = Collector(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield own
        server.shutdown()
