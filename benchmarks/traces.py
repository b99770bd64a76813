"""The cost of traces: no-op runs of one process without traces, with one run in a hundred traced, and with all traced.

A burn-down as in `throughput.py`, in turns. The spans are sent by OTLP over HTTP to this process, which discards them.
Each traced run has two spans. If there are more than the SDK can send, it drops the rest.
"""

import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.conditions import durable_server
from benchmarks.report import rates
from benchmarks.throughput import one_process

ROUNDS = 7
RUNS = 100_000
OFF = "without traces"
A_HUNDREDTH = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}


def run(*, short: bool) -> None:
    rounds, runs = (1, 2000) if short else (ROUNDS, RUNS)
    with durable_server() as postgres, discarding_collector() as port, ExitStack() as stack:
        on = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_METRICS_EXPORTER": "none"}
        subjects: dict[str, Callable[[], float]] = {
            OFF: one_process(postgres, stack, runs),
            "one run in a hundred traced": one_process(postgres, stack, runs, **on, **A_HUNDREDTH),
            "all runs traced": one_process(postgres, stack, runs, **on),
        }
        measured: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(rounds):
            for name, measure in subjects.items():
                measured[name].append(measure())
    print(f"{'':<46} runs/s in each of {rounds} rounds")
    off = statistics.median(measured[OFF])
    for name, each in measured.items():
        print(f"{rates(name, each)}   × {statistics.median(each) / off:.2f}")


@contextmanager
def discarding_collector() -> Iterator[int]:
    """Accept everything that is sent, and return the port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
