"""The charts and sparklines of the dashboard: what they show, and what they cost."""

import re
from collections.abc import AsyncIterator
from datetime import datetime
from html import unescape
from typing import Any

import pytest

from app.fleet.dashboard.charts import minutes
from app.fleet.dashboard.frame import page
from app.fleet.engine.figures import run_minutes
from tests.integration.test_dashboard import alert, get, unhurried
from tests.support.runs import LocalInstance, local_instance

pytestmark = pytest.mark.anyio

MAX_PAGE = 100_000


@pytest.fixture(autouse=True)
def read_anew_and_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_minutes, "INTERVAL", 3600.0)
    unhurried(monkeypatch)
    for span in minutes.MAX_AGE:
        monkeypatch.setitem(minutes.MAX_AGE, span, 0.0)


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address) as own:
        yield own


async def insert(here: LocalInstance, name: str, ago: int, **figures: Any) -> None:
    """Insert a minute of an action; all actions are called `all`."""
    await here.sql(
        f"INSERT INTO run_minutes (minute, action_id, {', '.join(figures)}) "
        f"SELECT date_trunc('minute', clock_timestamp()) - make_interval(mins => %s), "
        f"coalesce((SELECT id FROM actions WHERE name = %s), 0), {', '.join(['%s'] * len(figures))}",
        ago,
        name,
        *figures.values(),
    )


def labels(html: str) -> list[str]:
    return [unescape(each) for each in re.findall(r'role="img" aria-label="([^"]*)"', html)]


def rows(html: str) -> list[list[str]]:
    """The rows of the table, without the time: the latest first."""
    found = re.findall(r'<tr><th scope="row">[^<]*</th>(.*?)</tr>', html)
    return [re.findall(r"<td>([^<]*)</td>", each) for each in found]


async def test_without_runs_the_page_says_what_to_do(here: LocalInstance) -> None:
    html = await get(here, "/charts")
    assert "Nothing has happened in the last hour" in html
    assert 'href="/dashboard/actions">Trigger a run' in html
    assert 'href="/dashboard/charts?span=day"' in html
    assert "<svg" not in html
    assert "no attempt of echo began" in await get(here, "/charts?span=day&action=echo")


async def test_runs_are_in_the_charts_after_the_next_flush(here: LocalInstance) -> None:
    for name in ("noop", "give-up"):
        await here.run(name)
    await here.engine.executor.writer.empty()
    await here.engine.minutes.flush()
    await here.engine.minutes.add_backlog()
    for path in ("/charts", "/charts?span=day"):
        html = await get(here, path)
        attempts, backlog, lateness = labels(html)
        assert "1 succeeded, 1 failed." in attempts
        assert backlog.endswith("none.")
        assert lateness.startswith("Lateness of the 2 runs that began")
    assert rows(html)[0][:5] == ["1", "1", "0", "0", "0"]
    assert "</svg> 1 failed</li>" in await get(here, "/charts?action=give-up")
    assert "1 succeeded." in labels(await get(here, "/charts?action=noop"))[0]


async def test_the_figures_of_a_minute_are_those_of_the_table(here: LocalInstance) -> None:
    await insert(here, "echo", 3, succeeded=1204, failed=3, work_seconds=12, begun=4, waited_seconds=8)
    await insert(here, "noop", 3, retried=5, begun=1, waited_seconds=2, longest_wait_seconds=2)
    await insert(here, "all", 3, waiting=9, oldest_seconds=61)
    await insert(here, "noop", 7, cancelled=2)
    await insert(here, "noop", 3 + 24 * 60, succeeded=77)
    html = await get(here, "/charts")
    assert len(rows(html)) == 60
    shown, earlier = [row for row in rows(html) if row[:5] != ["0"] * 5]
    assert earlier[2:] == ["2", "0", "0", "0 ms", "0", "", "", "not known", ""], "a backlog that no leader has read"
    assert shown == ["1,204", "3", "0", "5", "0", "12 s", "5", "2.0 s", "2.0 s", "9", "1 min 1 s"]
    attempts, backlog, lateness = labels(html)
    assert "1,204 succeeded, 3 failed, 2 cancelled, 5 retried. Most in a minute: 1,212, at " in attempts
    assert "at most 9, at " in backlog
    assert "2.0 s on average, at most 2.0 s" in lateness
    own = [row for row in rows(await get(here, "/charts?action=echo")) if row[0] != "0"]
    assert own == [["1,204", "3", "0", "0", "0", "12 s", "4", "2.0 s", "0 ms", "0", ""]], "it had no backlog"
    day = rows(await get(here, "/charts?span=day"))
    assert len(day) == 96
    assert sum(int(row[0].replace(",", "")) for row in day) == 1204


async def test_actions_have_a_sparkline_and_the_outcomes_of_the_last_hour(here: LocalInstance) -> None:
    await insert(here, "echo", 30, succeeded=1200)
    await insert(here, "echo", 2, succeeded=4, failed=3, begun=2, waited_seconds=4, longest_wait_seconds=3)
    await insert(here, "all", 2, waiting=5, oldest_seconds=1)
    await insert(here, "noop", 90, succeeded=1)
    for path in ("/actions", "/actions/echo"):
        html = await get(here, path)
        (label,) = labels(html)
        assert label == "Attempts in the last hour, two minutes a bar: 1,204 succeeded, 3 failed"
        assert "began up to 3.0 s late, 2.0 s on average" in html
        (drawn,) = re.findall(r'<svg class="spark".*?</svg>', html, re.DOTALL)
        assert len(drawn) < 600
    assert 'href="/dashboard/charts?action=echo"' in html
    assert "No attempt began or ended" in await get(here, "/actions/noop")


async def test_an_unknown_action_or_span_is_refused_with_a_page(here: LocalInstance) -> None:
    assert "there is no action" in alert(await get(here, "/charts?action=none", 404))
    assert "it is hour or day" in alert(await get(here, "/charts?span=week", 400))


async def test_full_charts_are_light_and_a_day_of_a_hundred_actions_is_read_in_time(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    await here.sql(
        "INSERT INTO run_minutes "
        "SELECT date_trunc('minute', now()) - make_interval(mins => m), a, 123456, 7890, 123, 456, 78, 12345.678, 12, "
        "1234.5678, 12.345678, 12345, 123.45678 FROM generate_series(0, 1439) AS m, generate_series(0, 100) AS a"
    )
    monkeypatch.setattr(page, "TIME_LIMIT", 2.0)
    files = re.findall(r'(?:href|src)="(/dashboard/static/[^"]*)"', await get(here, "/charts"))
    static = sum([len((await here.running.client.get(file)).content) for file in files])
    for path in ("/charts", "/charts?span=day", "/charts?span=day&action=echo"):
        html = await get(here, path)
        assert len(html.encode()) + static <= MAX_PAGE
        assert not re.search(r"<style|\sstyle=|<script(?! src=)|\son[a-z]+=", html)
    assert "Attempts in the last hour" in await get(here, "/actions")


async def test_viewers_share_what_is_read(here: LocalInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    for span in minutes.MAX_AGE:
        monkeypatch.setitem(minutes.MAX_AGE, span, 3600.0)
    read: list[minutes.Span] = []
    genuine = minutes.parameters

    def parameters(span: minutes.Span, since: datetime) -> dict[str, Any]:
        read.append(span)
        return genuine(span, since)

    monkeypatch.setattr(minutes, "parameters", parameters)
    for _ in range(3):
        for path in ("/charts", "/actions", "/actions/echo", "/charts?action=echo"):
            await get(here, path)
    assert len(read) == 3
