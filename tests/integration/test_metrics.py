"""The metrics of an instance and of the cluster, as a scrape returns them."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from app.fleet import Run, action
from app.fleet.db.namespace import Statement
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.execute.attempt import Attempt
from app.fleet.engine.figures import cluster_figures
from app.fleet.engine.figures.minute_counts import MinuteCounts
from app.fleet.engine.figures.run_metrics import RunMetrics
from app.fleet.runs.effects.states import RunState
from app.fleet.telemetry import tracing
from app.fleet.telemetry.metrics import MAX_NAMES, OTHERS
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio

MODULES = ("tests.support.trial_actions", "tests.integration.test_metrics")
LATER = datetime(2999, 1, 1, tzinfo=UTC)
POSTPONE_FIRST_OF = """
UPDATE runs SET run_at = now() + interval '1 h' WHERE id = (SELECT min(id) FROM runs WHERE ordering_key = %s)
"""
RUN_OF = "UPDATE runs SET state = 'running' WHERE id = (SELECT max(id) FROM runs WHERE action_id = %s)"
SHIPPED = Counter("trial_parcels_shipped_total", "A metric of the service's own")


@action("single-file", concurrency=3)
async def single_file(_: Run) -> None: ...


@action("hourly", every="1h", misfire="once")
async def hourly(_: Run) -> None: ...


@pytest.fixture
async def here(address: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalInstance]:
    # So that each scrape of a test is up to date.
    monkeypatch.setattr(cluster_figures, "MAX_AGE", 0.0)
    async with local_instance(address, actions=MODULES) as own:
        yield own


async def scrape(here: LocalInstance) -> dict[tuple[str, frozenset[str]], float]:
    """Return all samples by their name and the values of their labels."""
    answer = await here.running.client.get("/metrics")
    assert answer.status_code == 200
    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def value(here: LocalInstance, name: str, *labels: str) -> float | None:
    return (await scrape(here)).get((name, frozenset(labels)))


async def test_attempts_are_counted_by_action_and_outcome(here: LocalInstance) -> None:
    for name, payload in (("noop", None), ("noop", None), ("echo", {"n": 1}), ("fail", None), ("give-up", None)):
        await here.run(name, payload)
    await here.engine.executor.writer.empty()
    found = await scrape(here)

    def of(name: str, *labels: str) -> float:
        return found[name, frozenset(labels)]

    assert [of("flotilla_runs_started_total", name) for name in ("noop", "echo", "fail", "give-up")] == [2, 1, 3, 1]
    assert of("flotilla_runs_ended_total", "noop", "succeeded") == 2
    assert of("flotilla_runs_ended_total", "noop", "failed") == 0
    assert [of("flotilla_runs_ended_total", "fail", each) for each in ("retried", "failed")] == [2, 1]
    assert of("flotilla_runs_ended_total", "give-up", "failed") == 1
    assert of("flotilla_run_duration_seconds_count", "fail") == 3
    assert of("flotilla_run_wait_seconds_count", "fail") == 1, "the second and third attempts waited for a retry"


async def test_durations_waits_and_latenesses_are_measured(here: LocalInstance) -> None:
    await here.run("nap", {"seconds": 0.3})
    await here.sql("UPDATE actions SET next_run_at = now() - interval '90 seconds' WHERE name = 'hourly'")
    here.engine.scheduler.schedule_now()

    async def lateness() -> float | None:
        return await value(here, "flotilla_run_lateness_seconds_sum", "hourly")

    assert 90 <= await soon(lateness) < 150
    await here.engine.executor.writer.empty()
    found = await scrape(here)
    assert 0.3 <= found["flotilla_run_duration_seconds_sum", frozenset(["nap"])] < 30
    assert found["flotilla_run_wait_seconds_sum", frozenset(["nap"])] < 30
    assert found["flotilla_runs_ended_total", frozenset(["hourly", "failed"])] == 0, "also before the first one"
    assert ("flotilla_run_lateness_seconds_sum", frozenset(["nap"])) not in found, "it was not scheduled"


async def test_runs_that_could_begin_now_are_counted_and_no_others(here: LocalInstance) -> None:
    await here.engine.dispatcher.stop()

    async def runnable() -> dict[str, tuple[float, float]]:
        found = await scrape(here)
        return {
            name: (
                found["flotilla_cluster_runnable_runs", frozenset([name])],
                found["flotilla_cluster_oldest_runnable_seconds", frozenset([name])],
            )
            for name in ("noop", "echo", "single-file", "nap")
            if ("flotilla_cluster_runnable_runs", frozenset([name])) in found
        }

    assert await runnable() == dict.fromkeys(("noop", "echo", "single-file", "nap"), (0, 0))
    await here.trigger_all(
        [
            *[Order("noop", priority=number % 3) for number in range(30)],
            *[Order("echo", ordering_key=f"k{number % 4}") for number in range(20)],
            *[Order("single-file") for _ in range(10)],
        ]
    )
    await here.sql("UPDATE runs SET run_at = now() - interval '100 s' WHERE id = (SELECT min(id) FROM runs)")
    # Due later, and the first run of an ordering key that is due later: the key waits for it.
    await here.trigger_all([Order("nap", run_at=LATER), Order("noop", run_at=LATER)])
    await here.sql(POSTPONE_FIRST_OF, "k3")
    found = await runnable()
    assert {name: many for name, (many, _) in found.items()} == {"noop": 30, "echo": 3, "single-file": 3, "nap": 0}
    assert 100 <= found["noop"][1] < 160
    await here.sql(RUN_OF, here.engine.catalogue.id_of("single-file"))
    assert (await runnable())["single-file"][0] == 2

    assert (await here.running.client.post("/actions/noop/pause")).status_code == 200
    assert "noop" not in await runnable()
    await here.sql("UPDATE instances SET role = 'web'")
    assert await runnable() == {}, "no instance executes them"


async def test_every_instance_returns_the_figures_of_the_cluster(address: str) -> None:
    async with local_instance(address) as first, local_instance(address, role="web") as second:
        await second.wait_for_leader()
        figures = []
        for each in (first, second):
            found = await scrape(each)
            figures.append({key: count for key, count in found.items() if key[0].startswith("flotilla_cluster_")})
        assert figures[0].keys() == figures[1].keys()
        assert figures[0]["flotilla_cluster_instances", frozenset(["all", "ready"])] == 1
        assert figures[1]["flotilla_cluster_instances", frozenset(["web", "ready"])] == 1
        assert figures[1]["flotilla_cluster_leaders", frozenset()] == 1
        assert figures[0]["flotilla_cluster_connections", frozenset()] == 24


async def test_many_scrapes_within_the_maximum_age_read_the_database_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, fifty scrapes take longer than the second that it usually is.
    monkeypatch.setattr(cluster_figures, "MAX_AGE", 3600.0)
    async with local_instance(address) as here:
        await asyncio.gather(*(here.running.client.get("/metrics") for _ in range(50)))
        assert here.engine.figures.reads == 1


async def test_without_the_database_a_scrape_has_the_metrics_of_the_instance(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster_figures, "RUNNABLE", Statement("SELECT pg_sleep(60)"))
    monkeypatch.setattr(cluster_figures, "TIMEOUT", 0.1)
    assert await scrape(here)
    found = await scrape(here)
    assert caplog.messages.count("figures.failed") == 1
    assert ("flotilla_ready", frozenset()) in found
    assert not [name for name, _ in found if name.startswith("flotilla_cluster_")]


async def test_metrics_of_the_service_the_process_and_the_garbage_collector_are_there(here: LocalInstance) -> None:
    before = await value(here, "trial_parcels_shipped_total")
    SHIPPED.inc(2)
    found = await scrape(here)
    assert found["trial_parcels_shipped_total", frozenset()] == (before or 0) + 2
    names = {name for name, _ in found}
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes", "python_gc_collections_total"} <= names
    assert {"flotilla_event_loop_lag_seconds_count", "flotilla_pool_wait_seconds_count"} <= names


async def test_before_the_time_of_postgresql_is_known_no_wait_is_measured() -> None:
    async def nothing(_: Run) -> None: ...

    catalogue = Catalogue({"a": action("a")(nothing)})
    catalogue.set_ids({"a": 1})
    metrics = RunMetrics(catalogue, MinuteCounts(lambda: None))
    metrics.started([(1, 1, 1, 1, 0, 1, 0, "code", None, None, None, 2, None, None, None, False, LATER)], None)
    samples = {(s.name, s.labels.get("action")): s.value for family in metrics.collect() for s in family.samples}
    assert samples["flotilla_runs_started_total", "a"] == 1
    assert ("flotilla_run_wait_seconds_count", "a") not in samples


async def test_a_span_processor_that_raises_affects_no_run(
    address: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken(SpanProcessor):
        def on_end(self, span: object) -> None:
            if getattr(span, "name", "").split()[0] in {"process", "settle", "receive"}:
                raise RuntimeError("the collector of the service is broken")

    provider = TracerProvider()
    provider.add_span_processor(Broken())
    monkeypatch.setattr(tracing, "tracer", lambda: provider.get_tracer("test"))
    monkeypatch.setattr(tracing, "failed", set())
    async with local_instance(address, concurrency=3) as here:
        for _ in range(5):
            assert (await here.run("noop")).state == "succeeded"
        await here.engine.executor.writer.empty()
        assert here.engine.executor.room == 3, "every slot is free again"
    lines = [line for line in capfd.readouterr().err.splitlines() if "tracing.failed" in line]
    assert len(lines) == 3


async def test_more_actions_than_the_limit_share_one_series() -> None:
    async def nothing(_: Run) -> None: ...

    actions = {f"action-{number}": action(f"action-{number}")(nothing) for number in range(MAX_NAMES + 50)}
    catalogue = Catalogue(actions)
    catalogue.set_ids({name: number for number, name in enumerate(actions, 1)})
    metrics = RunMetrics(catalogue, MinuteCounts(lambda: None))
    metrics.ended([attempt_of(each, number) for number, each in enumerate(actions.values(), 1)], RunState.SUCCEEDED)
    (ended,) = [family for family in metrics.collect() if family.name == "flotilla_runs_ended"]
    by_name = {s.labels["action"]: s.value for s in ended.samples if s.labels["outcome"] == "succeeded"}
    assert len(by_name) == MAX_NAMES + 1
    assert by_name[OTHERS] == 50


def attempt_of(declared: Action[Any], action_id: int) -> Attempt:
    row = (action_id, action_id, 1, 1, 0, 1, 0, "code", None, None, None, 2, None, None, None)
    return Attempt(declared, None, row)  # type: ignore[arg-type]
