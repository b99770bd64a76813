"""A run knows the run that triggered it; its page on the dashboard shows both directions, and links its trace."""

import re
from collections.abc import AsyncIterator

import psycopg
import pytest

from app.fleet import Run, TryAgain, action, trigger, trigger_many
from app.fleet.dashboard import run as run_page
from app.fleet.db.namespace import Namespace
from app.fleet.engine.enqueue.orders import Order
from app.fleet.runs.read import relations
from app.fleet.runs.read.pages import NEWEST
from tests.integration.test_dashboard import get, unhurried
from tests.integration.test_pages import rows_read_by, scans
from tests.support.runs import LocalInstance, local_instance

pytestmark = pytest.mark.anyio

TRACE = "0af7651916cd43dd8448eb211c80319c"


@action("branch-out", retries=0)
async def branch_out(_: Run) -> list[int]:
    """Trigger runs in every way in which their rows are inserted."""
    orders = [Order("noop"), Order("noop", key="a"), Order("noop", ordering_key="o")]
    orders.append(Order("noop", key="b", ordering_key="o"))
    many = await trigger_many(orders)
    return [*many, await trigger("noop", key="c"), await trigger("noop", ordering_key="p"), await trigger("noop")]


@action("stumble-once", retries=1, retry_delay="50ms")
async def stumble_once(run: Run) -> None:
    """Go back to pending in the first attempt, and fail in the second."""
    if run.attempt == 1:
        raise TryAgain("not yet", after=0.05)
    raise ValueError("the parcel is torn")


@action("hand-over", retries=0)
async def hand_over(_: Run) -> int:
    return await trigger("stumble-once")


@pytest.fixture(autouse=True)
def no_time_limit_and_no_shared_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch)


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    actions = ("tests.support.trial_actions", __name__)
    async with local_instance(address, actions=actions, trace_url="https://traces.example/t/{trace_id}?x=1") as own:
        yield own


def section(html: str, name: str) -> str:
    found = re.search(rf'<section aria-labelledby="{name}">.*?</section>', html, re.DOTALL)
    return found[0] if found else ""


async def test_every_run_that_is_triggered_in_an_attempt_has_the_id_of_its_run(here: LocalInstance) -> None:
    parent = await here.run("branch-out")
    assert len(set(parent.result)) == 7
    for child in parent.result:
        ended = await here.ended(child)
        assert (ended.triggered_by, ended.trigger) == (parent.id, "code")
    assert parent.triggered_by is None
    answer = await here.running.client.get(f"/runs/{parent.result[0]}")
    assert answer.json()["triggered_by"] == parent.id
    by_request = await here.running.client.post("/actions/noop/runs", json={})
    assert by_request.json()["triggered_by"] is None


async def test_a_run_keeps_its_triggerer_when_it_is_returned_ends_and_is_retried(here: LocalInstance) -> None:
    parent = await here.run("hand-over")
    child = await here.ended(parent.result)
    assert (child.state, child.attempt, child.triggered_by) == ("failed", 2, parent.id)
    await here.sql("UPDATE actions SET paused_at = now() WHERE name = 'stumble-once'")
    retried = await here.running.client.post(f"/runs/{child.id}/retry")
    assert (retried.json()["state"], retried.json()["triggered_by"]) == ("pending", parent.id)


async def test_the_page_of_a_run_shows_the_run_that_triggered_it_and_those_it_has_triggered(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = await here.run("branch-out")
    html = await get(here, f"/runs/{parent.id}")
    assert "Triggered 7 runs" in section(html, "triggered")
    assert "are shown" not in section(html, "triggered")
    links = re.findall(r'href="/dashboard/runs/(\d+)"', section(html, "triggered"))
    assert links == [str(each) for each in sorted(parent.result, reverse=True)]
    assert "Triggered by" not in html

    monkeypatch.setattr(run_page, "TRIGGERED_RUNS", 2)
    html = await get(here, f"/runs/{parent.id}")
    assert "Triggered 7 runs" in section(html, "triggered")
    assert "The newest 2 are shown" in section(html, "triggered")
    assert re.findall(r'href="/dashboard/runs/(\d+)"', section(html, "triggered")) == links[:2]

    child = await get(here, f"/runs/{links[0]}")
    assert f'<a href="/dashboard/runs/{parent.id}">run {parent.id}</a> (branch-out)' in child
    assert section(child, "triggered") == ""
    await here.sql("DELETE FROM finished_runs WHERE id = %s", parent.id)
    assert f"run {parent.id}, which was deleted" in await get(here, f"/runs/{links[0]}")


async def test_the_page_of_a_run_links_its_trace(here: LocalInstance) -> None:
    run = await here.run("noop")
    assert "traces.example" not in await get(here, f"/runs/{run.id}")
    await here.sql("UPDATE finished_runs SET trace_parent = %s", f"00-{TRACE}-b7ad6b7169203331-01")
    html = await get(here, f"/runs/{run.id}")
    assert f'<a href="https://traces.example/t/{TRACE}?x=1" rel="noopener noreferrer"><code>{TRACE}</code></a>' in html


FILL = """
INSERT INTO actions (name, misfire, overlap, priority, max_attempts, retention)
VALUES ('many', 'once', 'allow', 0, 1, '7d');

-- Run 1 has triggered the oldest half of the runs, and run 2 the newest ones in `runs`.
INSERT INTO finished_runs (id, action_id, state, priority, run_at, token, attempt, max_attempts, trigger, events,
                           created_at, finished_at, expires_at, triggered_by)
SELECT i, 1, 'succeeded', 0, now(), 1, 1, 1, 'code', 1, now(), now(), now(), CASE WHEN i <= 50000 THEN 1 END
FROM generate_series(1, 100000) AS i;

INSERT INTO runs (id, action_id, priority, run_at, max_attempts, trigger, triggered_by)
OVERRIDING SYSTEM VALUE
SELECT i, 1, 0, now(), 1, 'code', CASE WHEN i > 110000 THEN 2 END
FROM generate_series(100001, 120000) AS i;
"""


@pytest.mark.parametrize("run", [1, 2, 3])
def test_finding_the_runs_that_a_run_has_triggered_reads_few_rows(address: str, run: int) -> None:
    """However many they are, how far back they are, and however many other runs there are."""
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("SET search_path TO flotilla; SET synchronous_commit TO off")
        connection.execute(FILL)
        connection.execute("ANALYZE runs; ANALYZE finished_runs; ANALYZE actions")
        for statement, limit in ((relations.LIST, 20), (relations.COUNT, relations.MAX_COUNT + 1)):
            explain = b"EXPLAIN (ANALYZE, FORMAT JSON) " + Namespace("flotilla").sql(statement)
            row = connection.execute(
                explain, {"run": run, "limit": limit, "before": NEWEST, "after": 0}, prepare=False
            ).fetchone()
            assert row is not None
            for scan in scans(row[0][0]["Plan"]):
                assert scan["Node Type"] != "Seq Scan"
                assert rows_read_by(scan) <= 2 * limit, scan
