"""The page Coordination of the dashboard: locks, limits, breakers and pending keys, and what an operator changes."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from html import unescape

import pytest

from app.fleet import HeldLock, breaker, limit, lock, once, singleton
from app.fleet.dashboard import coordination
from app.fleet.dashboard.frame import page, shared_reads
from app.fleet.db.namespace import Statement
from app.fleet.engine.once import pending
from tests.integration.test_audit import logged
from tests.integration.test_dashboard import ADMIN, LINES, OPERATE, READ, alert, get, post, sign_in, unhurried
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio

ACTIONS = ("tests.support.trial_actions", __name__)


@singleton("singer")
async def singer(_: HeldLock) -> None:
    await asyncio.sleep(3600)


@pytest.fixture(autouse=True)
def no_time_limit_and_no_shared_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch)


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address, actions=ACTIONS) as own:
        own.engine.enter()
        yield own


@pytest.fixture
async def guarded(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address, api_keys=LINES, log_level="info") as own:
        own.engine.enter()
        yield own


def cells(html: str, name: str) -> list[str]:
    """Return the texts of the cells of the row that begins with this name."""
    for row in re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL):
        texts = [
            " ".join(unescape(re.sub(r"<[^>]*>", "", cell)).split())
            for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        ]
        if texts and texts[0] == name:
            return texts
    raise AssertionError(f"there is no row {name!r}: {html}")


async def open_breaker(name: str = "tides") -> None:
    with pytest.raises(RuntimeError):
        async with breaker(name, failures=1, rest="60s"):
            raise RuntimeError("down")


async def test_the_page_says_which_locks_are_those_of_singletons(here: LocalInstance) -> None:
    async def singleton_runs() -> bool:
        return bool(await here.sql("SELECT 1 FROM service_locks WHERE name = 'singleton:singer'"))

    await soon(singleton_runs)
    async with lock("reports"):
        html = await get(here, "/coordination")
    assert cells(html, "singer")[1:3] == ["singleton", "flotilla-1"]
    assert cells(html, "reports")[1:3] == ["lock", "flotilla-1"]


async def test_the_page_shows_how_much_of_each_limit_is_used(here: LocalInstance) -> None:
    await limit("tides", "1/h")
    for _ in range(3):
        await limit("pilots", "1/h", burst=10)
    await here.sql("INSERT INTO limits VALUES ('old', clock_timestamp() + interval '1 h')")
    html = await get(here, "/coordination")
    assert re.fullmatch("next permit in (1 h|59 min.*)", cells(html, "tides")[3])
    assert cells(html, "tides")[1:3] == ["1/h", "1"]
    assert cells(html, "pilots")[1:] == ["1/h", "10", "free now: 7 of 10"]
    assert cells(html, "old")[1:3] == ["unknown", "unknown"]
    assert cells(html, "old")[3].startswith("used up for at most")


async def test_the_page_shows_how_much_of_the_limits_of_actions_is_used(here: LocalInstance) -> None:
    await here.sql("UPDATE actions SET concurrency = 3, rate_interval = 60, rate_burst = 1 WHERE name = 'nap'")
    assert cells(await get(here, "/coordination"), "nap")[1:] == ["0 of 3", "1/m", "1", "free now"]
    run_id = await here.trigger("nap", {"seconds": 3600})
    await here.attempt(run_id)
    await here.sql("UPDATE actions SET rate_used_until = clock_timestamp() + interval '59 s' WHERE name = 'nap'")
    running, *_, use = cells(await get(here, "/coordination"), "nap")[1:]
    assert running == "1 of 3"
    assert re.fullmatch(r"next start in 5\d s", use)


async def test_an_open_breaker_is_closed_by_hand(
    guarded: LocalInstance, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reads, "MAX_AGE", 3600.0)
    await open_breaker()
    await sign_in(guarded, READ[0])
    html = await get(guarded, "/coordination")
    assert cells(html, "tides")[1] == "open"
    assert re.fullmatch(r"refuses all calls for another .*", cells(html, "tides")[2])
    assert "Close tides" not in html
    assert (await post(guarded, "/coordination", "/coordination/breakers/close", name="tides")).status_code == 403
    await sign_in(guarded, OPERATE[0])
    assert "Close tides" in await get(guarded, "/coordination")
    caplog.clear()
    caplog.set_level(logging.INFO)
    closed = await post(guarded, "/coordination", "/coordination/breakers/close", name="tides")
    assert closed.headers["location"] == "/dashboard/coordination"
    assert cells(await get(guarded, "/coordination"), "tides")[1:3] == ["closed", "all calls pass"]
    (event,) = logged(caplog, "breaker.closed_by_hand")
    assert (event["breaker"], event["by"]) == ("tides", "API key alice, on the dashboard")
    (audited,) = [each for each in logged(caplog, "request.audited") if each["route"].endswith("/close")]
    assert (audited["caller"], audited["subject"], audited["status"]) == ("alice", "tides", 303)
    again = await post(guarded, "/coordination", "/coordination/breakers/close", name="tides")
    assert again.status_code == 303, "it is closed already, and stays so"
    assert len(logged(caplog, "breaker.closed_by_hand")) == 1
    wrong = await post(guarded, "/coordination", "/coordination/breakers/close", name="")
    assert "the name of a breaker" in alert(wrong.text)


async def test_the_page_shows_whether_a_probe_is_allowed_or_runs(here: LocalInstance) -> None:
    await open_breaker()
    await here.sql("UPDATE breakers SET open_until = clock_timestamp() - interval '1 s'")
    assert cells(await get(here, "/coordination"), "tides")[2] == "the next call is the probe"
    await here.sql("UPDATE breakers SET probe_instance = 1, probe_until = clock_timestamp() + interval '1 h'")
    assert cells(await get(here, "/coordination"), "tides")[2].startswith("a probe runs on flotilla-1")
    await here.sql("UPDATE breakers SET probe_until = clock_timestamp()")
    assert cells(await get(here, "/coordination"), "tides")[2] == "the next call is the probe"


async def test_the_page_shows_the_oldest_pending_keys_and_hides_them_from_those_who_only_look(
    guarded: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with once("filings", "ada@example.org"):
        await sign_in(guarded, OPERATE[0])
        shown = cells(await get(guarded, "/coordination"), "filings")
        assert (shown[1], shown[3]) == ("ada@example.org", "on flotilla-1")
        await sign_in(guarded, READ[0])
        html = await get(guarded, "/coordination")
        assert "ada@" not in html
        assert cells(html, "filings")[1] == "hidden: needs the scope operate"
    monkeypatch.setattr(coordination, "SHOWN_KEYS", 2)
    await guarded.sql(
        "INSERT INTO once_keys (scope, key, token, state, instance_id, run_id, run_token, taken_at) "
        "SELECT 'mail', n::text, n, 'pending', 999, 4711, 1, now() - n * interval '1 s' FROM generate_series(1, 3) AS n"
    )
    await sign_in(guarded, ADMIN[0])
    html = await get(guarded, "/coordination")
    assert "3 pending; the oldest 2 are shown" in html
    assert cells(html, "mail")[1::2] == ["3", "has ended: the key is free for the next block"]


async def test_pending_keys_that_are_not_found_in_time_hide_nothing_else(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "READ_OLDEST", Statement("SELECT pg_sleep(60)"))
    monkeypatch.setattr(page, "TIME_LIMIT", 1.0)
    async with lock("reports"):
        html = await get(here, "/coordination")
    assert "did not find the pending keys within a second" in html
    assert cells(html, "reports")[1] == "lock"


async def test_each_list_has_an_end_and_says_so(here: LocalInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "SHOWN", 2)
    await here.sql("INSERT INTO limits SELECT 'limit-' || n, now() FROM generate_series(1, 3) AS n")
    await here.sql("INSERT INTO breakers (name) SELECT 'breaker-' || n FROM generate_series(1, 3) AS n")
    await here.sql("UPDATE breakers SET open_until = now() + interval '1 h' WHERE name = 'breaker-3'")
    html = await get(here, "/coordination")
    assert html.count("Only the first 2 are shown") == 3, "limits, breakers, and the limited actions of the tests"
    assert "limit-3" not in html
    assert "breaker-2" not in html
    assert "breaker-3" in html, "open breakers come first"
