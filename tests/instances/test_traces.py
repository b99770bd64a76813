"""One trace holds a request, the run that it triggers on another instance, and the run that this one triggers.

The variable of `docs/guides/traces.md` switches traces on (`tests/support/otlp.py`).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.fleet.telemetry.logs import PROBES
from tests.support.fleet import Fleet
from tests.support.otlp import Collector, Span, collector
from tests.support.postgres import eventually

TRIAL = "tests.support.trial_actions"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "order-4711"}


@pytest.fixture
def sink() -> Iterator[Collector]:
    with collector() as own:
        yield own


@pytest.fixture
def fleet(address: str, tmp_path: Path, sink: Collector) -> Iterator[Fleet]:
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=TRIAL, **sink.environment) as own:
        yield own


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def ancestors(spans: list[Span], span: Span) -> list[str]:
    """Return the names of the spans above this one."""
    by_id = {each.id: each for each in spans}
    names = []
    while span.parent in by_id:
        span = by_id[span.parent]
        names.append(span.name)
    return names


def test_a_trace_goes_from_the_request_through_a_run_elsewhere_to_the_run_that_it_triggers(
    fleet: Fleet, sink: Collector
) -> None:
    (web,) = fleet.start(FLOTILLA_ROLE="web")
    workers = fleet.start(2, FLOTILLA_ROLE="worker")
    answer = web.client.post("/actions/spawn/runs", json={}, headers=HEADERS)
    assert answer.status_code == 202, answer.text
    run = web.ended(answer.json()["id"])
    child = web.ended(run["result"])
    for each in (answer.json(), run, child):
        assert (each["trace_id"], each["request_id"]) == (TRACE, "order-4711")

    post = "POST /actions/{name}/runs"
    spans = sink.wait_for(TRACE, post, "create spawn", "process spawn", "settle spawn", "create echo", "process echo")
    (request,) = named(spans, post)
    assert request.parent == CALLER
    (process,) = named(spans, "process echo")
    assert [name for name in ancestors(spans, process) if not name.startswith("fastapi.")] == [
        "create echo", "process spawn", "create spawn", post,
    ]  # fmt: skip
    assert process.attributes["messaging.system"] == "flotilla"
    assert process.attributes["messaging.destination.name"] == "echo"
    assert process.attributes["messaging.message.id"] == str(child["id"])
    assert process.attributes["messaging.client.id"] == child["instance"]
    assert {each.me()["name"] for each in workers} >= {run["instance"], child["instance"]}
    assert not [span for span in sink.spans if span.attributes.get("url.path") in {*PROBES, "/metrics"}]

    lines = [line for each in workers for line in each.lines("trial.spawns")]
    assert [(line["trace_id"], line["request_id"], line["run"]) for line in lines] == [(TRACE, "order-4711", run["id"])]


def test_the_attempt_after_a_kill_is_in_the_trace_with_a_link(fleet: Fleet, sink: Collector) -> None:
    (web,) = fleet.start(FLOTILLA_ROLE="web")
    (first,) = fleet.start(FLOTILLA_ROLE="worker")
    run_id = web.client.post("/actions/sleep-once/runs", json={}, headers=HEADERS).json()["id"]
    eventually(lambda: web.run(run_id)["state"] == "running")
    (second,) = fleet.start(FLOTILLA_ROLE="worker")
    first.kill()
    run = web.ended(run_id)
    assert (run["state"], run["instance"]) == ("succeeded", second.me()["name"])
    spans = sink.wait_for(TRACE, "create sleep-once", "process sleep-once")
    (created,) = named(spans, "create sleep-once")
    (process,) = named(spans, "process sleep-once")
    assert process.parent == created.id
    assert process.links == [(created.id, {"flotilla.attempt": 2, "flotilla.why": "takeover"})]


def test_a_failed_attempt_has_the_kind_of_its_error_and_its_retry_a_link(fleet: Fleet, sink: Collector) -> None:
    (instance,) = fleet.start()
    run_id = instance.client.post("/actions/fail-once/runs", json={}, headers=HEADERS).json()["id"]
    assert instance.ended(run_id)["state"] == "succeeded"
    spans = sink.wait_for(TRACE, "process fail-once", "settle fail-once")
    first, second = eventually(
        lambda: found if len(found := named(sink.of_trace(TRACE), "process fail-once")) == 2 else None
    )
    assert (first.failed, first.attributes["error.type"], first.links) == (True, "TryAgain", [])
    assert (second.failed, [why for _, why in second.links]) == (
        False,
        [{"flotilla.attempt": 2, "flotilla.why": "retry"}],
    )
    assert not [span for span in spans if "not yet" in str(span.attributes)], "texts of errors may have secrets"


def test_a_collector_that_does_not_answer_delays_nothing(address: str, tmp_path: Path) -> None:
    gone = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_METRICS_EXPORTER": "none"}
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=TRIAL, **gone) as fleet:
        (instance,) = fleet.start()
        assert instance.ended(instance.trigger("spawn")["id"])["state"] == "succeeded"
        instance.terminate()
        assert instance.wait_exit() in {0, -15}
        assert instance.lines("shutdown.finished")
        assert not instance.lines("shutdown.watchdog")


def test_without_its_environment_there_are_no_traces(address: str, tmp_path: Path) -> None:
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=TRIAL) as fleet:
        (instance,) = fleet.start()
        run = instance.client.post("/actions/spawn/runs", json={}, headers=HEADERS).json()
        ended = instance.ended(run["id"])
        assert (ended["trace_id"], ended["request_id"]) == (None, "order-4711")
        assert instance.run(ended["result"])["request_id"] == "order-4711"
