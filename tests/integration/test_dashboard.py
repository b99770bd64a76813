"""The dashboard: what its pages show, who may see and change what, and what it costs."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from html import unescape
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from app.fleet.api_keys import make_key
from app.fleet.dashboard import run as run_page
from app.fleet.dashboard.frame import cluster_reads, page, session, shared_reads
from app.fleet.db.namespace import Statement
from app.main import create_app
from app.settings import Settings
from tests.integration.test_audit import logged
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio

READ, OPERATE, ADMIN = make_key("bob", "read"), make_key("alice", "operate"), make_key("root", "admin")
LINES = ",".join(line for _, line in (READ, OPERATE, ADMIN))
PAGES = ("", "/actions", "/actions/echo", "/runs", "/coordination", "/sign-in")
MAX_FIRST_PAGE = 100_000


def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a statement take longer than the second that a page allows, and let each page read for itself."""
    monkeypatch.setattr(page, "TIME_LIMIT", 60.0)
    monkeypatch.setattr(page, "KEPT", 0.0)
    monkeypatch.setattr(shared_reads, "TIMEOUT", 60.0)
    monkeypatch.setattr(shared_reads, "MAX_AGE", 0.0)
    monkeypatch.setattr(shared_reads, "RATE", 1e9)
    monkeypatch.setattr(cluster_reads, "SLOW_AGE", 0.0)
    monkeypatch.setattr(run_page, "RUN_AGE", 0.0)


@pytest.fixture(autouse=True)
def no_time_limit_and_no_shared_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch)


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    """An instance without keys, as in development: every viewer may do everything."""
    async with local_instance(address) as own:
        yield own


@pytest.fixture
async def guarded(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address, api_keys=LINES, log_level="info") as own:
        yield own


async def get(here: LocalInstance, path: str, status: int = 200) -> str:
    answer = await here.running.client.get(f"/dashboard{path}")
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer.text


async def post(here: LocalInstance, form_on: str, path: str, **fields: str) -> httpx.Response:
    """Send a form of a page: its token, and these fields."""
    token = value_of(await get(here, form_on), "token")
    data = {name.replace("__", "."): value for name, value in fields.items()}
    return await here.running.client.post(f"/dashboard{path}", data={"token": token, **data})


async def sign_in(here: LocalInstance, key: str, to: str = "/dashboard") -> httpx.Response:
    here.running.client.cookies.clear()
    return await post(here, "/sign-in", "/sign-in", key=key, to=to)


def value_of(html: str, field: str) -> str:
    found = re.search(rf'name="{re.escape(field)}" value="([^"]*)"', html)
    assert found is not None, html
    return unescape(found[1])


def alert(html: str) -> str:
    found = re.search(r'role="alert">(.*?)</p>', html, re.DOTALL)
    assert found is not None, html
    return unescape(found[1])


async def test_every_page_is_whole_without_the_script_and_loads_nothing_from_elsewhere(here: LocalInstance) -> None:
    await here.run("fail")
    await here.trigger("nap", {"seconds": 3600})
    for path in (*PAGES, "/runs/1", "/runs/2"):
        answer = await here.running.client.get(f"/dashboard{path}")
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-security-policy"] == page.POLICY
        assert "unsafe" not in page.POLICY
        html = answer.text
        assert not re.search(r"<style|\sstyle=|<script(?! src=)|\son[a-z]+=", html), path
        assert {
            link.startswith(("/dashboard", "#")) for link in re.findall(r'(?:href|src|action)="([^"]*)"', html)
        } == {True}
        assert html.count("<h1>") == 1
        assert '<html lang="en">' in html


async def test_the_first_page_is_light(here: LocalInstance) -> None:
    html = await get(here, "")
    files = re.findall(r'(?:href|src)="(/dashboard/static/[^"]*)"', html)
    answers = [await here.running.client.get(file) for file in files]
    assert len(html.encode()) + sum(len(answer.content) for answer in answers) <= MAX_FIRST_PAGE
    assert len(answers) == 3
    for answer in answers:
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert (await here.running.client.get(files[0].replace("/dashboard.css", "/none.css"))).status_code == 404


async def test_the_fleet_shows_instances_anomalies_and_the_last_hour(here: LocalInstance) -> None:
    await here.wait_for_leader()
    await here.sql("INSERT INTO leader_terms (instance_id, instance) SELECT 1, 'flotilla-1' FROM generate_series(1, 9)")

    async def shown() -> bool:
        return "leader_flapping" in await get(here, "")

    await soon(shown)
    html = await get(here, "")
    assert "docs/runbook/leader_flapping.md" in html
    assert ">flotilla-1<" in html
    run_id = await here.trigger("nap", {"seconds": 3600})
    await here.attempt(run_id)
    working = '1 of 100: <a href="/dashboard/actions/nap">nap</a>'

    async def works() -> bool:
        return working in await get(here, "")

    await soon(works)
    assert "became the leader" in html
    assert "joined" in html


async def test_an_action_is_paused_and_resumed(here: LocalInstance) -> None:
    assert (await post(here, "/actions", "/actions/echo/pause")).headers["location"] == "/dashboard/actions/echo"
    assert 'class="state paused"' in await get(here, "/actions/echo")
    assert (await post(here, "/actions", "/actions/echo/resume")).status_code == 303
    assert 'class="state active"' in await get(here, "/actions/echo")
    assert "there is no action" in alert(await get(here, "/actions/none", 404))


async def test_a_run_is_triggered_by_a_form_made_from_the_type_of_the_payload(here: LocalInstance) -> None:
    form = await get(here, "/actions/weigh")
    assert re.search(r'<input type="number"[^>]* name="payload.weight"[^>]* required', form)
    key = value_of(form, "key")
    first = await post(here, "/actions/weigh", "/actions/weigh/runs", key=key, payload__weight="7")
    again = await post(here, "/actions/weigh", "/actions/weigh/runs", key=key, payload__weight="7")
    assert first.headers["location"] == again.headers["location"], "a form that is sent twice makes one run"
    run_id = int(first.headers["location"].rpartition("/")[2])
    assert (await here.ended(run_id)).result == 7
    html = await get(here, f"/runs/{run_id}")
    assert 'class="state succeeded"' in html
    assert "attempt 1 on flotilla-1" in html
    changed = await post(here, "/actions/weigh", "/actions/weigh/runs", key=key, payload__weight="8")
    assert changed.headers["location"] != first.headers["location"], "the payload was changed after a step back"

    refused = await post(here, "/actions/weigh", "/actions/weigh/runs", key=key, payload__weight="heavy")
    assert refused.status_code == 422
    assert "payload.weight" in alert(refused.text)
    assert value_of(refused.text, "payload.weight") == "heavy", "what was typed is not lost"

    free = await post(here, "/actions/echo", "/actions/echo/runs", key=key, payload='{"a": [1]}')
    assert (await here.ended(int(free.headers["location"].rpartition("/")[2]))).result == {"a": [1]}


async def test_a_run_is_cancelled_and_retried(here: LocalInstance) -> None:
    run_id = await here.trigger("nap", {"seconds": 3600})
    await here.attempt(run_id)
    assert (await post(here, f"/runs/{run_id}", f"/runs/{run_id}/cancel")).status_code == 303
    await here.until(run_id, "cancelled")
    assert (await post(here, f"/runs/{run_id}", f"/runs/{run_id}/retry")).status_code == 303
    await here.until(run_id, "running", "pending")
    refused = await post(here, f"/runs/{run_id}", f"/runs/{run_id}/retry")
    assert refused.status_code in {303, 409}
    assert "no run 999" in alert(await get(here, "/runs/999", 404))


async def test_a_run_with_very_many_events_shows_the_first_and_says_so(here: LocalInstance) -> None:
    run = await here.run("speak")
    assert "Only its first events" not in await get(here, f"/runs/{run.id}")
    await here.sql(
        "INSERT INTO run_events (run_id, seq, kind, data) "
        "SELECT %s, n, 'said', '1' FROM generate_series((SELECT events FROM finished_runs), 1500) AS n RETURNING 1",
        run.id,
    )
    await here.sql("UPDATE finished_runs SET events = 1501 RETURNING 1")
    assert "Only its first events" in await get(here, f"/runs/{run.id}")


async def test_the_page_of_a_run_is_told_when_the_run_has_new_events(here: LocalInstance) -> None:
    run_id = await here.trigger("nap", {"seconds": 3600})
    await here.attempt(run_id)
    address = re.search(r'data-events="/dashboard([^"]*)"', await get(here, f"/runs/{run_id}"))
    assert address is not None
    following = asyncio.create_task(here.running.client.get(f"/dashboard{address[1]}"))
    await soon(lambda: here.sql("SELECT 1 WHERE %s", here.running.context.stream.hub.followed == 1))
    await post(here, f"/runs/{run_id}", f"/runs/{run_id}/cancel")
    # It ends with the run.
    answer = await following
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "data: new" in answer.text
    assert "data-events" not in await get(here, f"/runs/{run_id}")
    assert (await here.running.client.get("/dashboard/runs/999/events")).status_code == 404


async def test_runs_are_filtered_and_paged_by_the_address(here: LocalInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.fleet.dashboard.runs.PAGE", 2)
    ids = [await here.trigger("echo") for _ in range(3)]
    failed = await here.run("give-up")
    for run_id in ids:
        await here.ended(run_id)
    html = await get(here, "/runs?action=echo")
    assert re.findall(r'href="/dashboard/runs/(\d+)"', html) == [str(ids[2]), str(ids[1])]
    older = unescape(re.findall(r'rel="next" href="/dashboard([^"]*)"', html)[0])
    assert re.findall(r'href="/dashboard/runs/(\d+)"', await get(here, older)) == [str(ids[0])]
    assert re.findall(r'href="/dashboard/runs/(\d+)"', await get(here, "/runs?state=failed")) == [str(failed.id)]
    assert "there is no such state" in alert(await get(here, "/runs?state=nonsense", 400))
    assert "No runs match" in await get(here, "/runs?state=cancelled")


async def test_a_lock_is_released_with_a_reason_and_the_name_of_the_key(
    guarded: LocalInstance, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = await guarded.trigger("hold-lock")

    async def held() -> list[tuple[Any, ...]]:
        return await guarded.sql("SELECT name FROM service_locks WHERE instance_id IS NOT NULL")

    ((name,),) = await soon(held)
    await sign_in(guarded, OPERATE[0])
    assert "Release" not in await get(guarded, "/coordination")
    refused = await post(guarded, "/actions", "/coordination/locks/release", name=name, reason="stuck")
    assert refused.status_code == 403
    assert "'admin'" in alert(refused.text)
    await sign_in(guarded, ADMIN[0])
    assert "a forced release needs a reason" in alert(
        (await post(guarded, "/coordination", "/coordination/locks/release", name=name, reason=" ")).text
    )
    caplog.clear()
    caplog.set_level(logging.INFO)
    assert (
        await post(guarded, "/coordination", "/coordination/locks/release", name=name, reason="stuck")
    ).status_code == 303
    (release,) = await guarded.sql("SELECT name, reason, released_by FROM lock_releases")
    assert release == (name, "stuck", "API key root, on the dashboard")
    (audited,) = [each for each in logged(caplog, "request.audited") if each["route"].endswith("/release")]
    assert (audited["caller"], audited["subject"], audited["status"]) == ("root", name, 303)
    await guarded.ended(run_id)


# -- who may see it ---------------------------------------------------------------------------------------------------


async def test_without_a_session_every_page_leads_to_the_sign_in_and_back(guarded: LocalInstance) -> None:
    for path in ("", "/actions", "/runs?state=failed", "/runs/1", "/coordination"):
        answer = await guarded.running.client.get(f"/dashboard{path}")
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/dashboard/sign-in?to=/dashboard")
    answer = await sign_in(guarded, READ[0], "/dashboard/runs?state=failed")
    assert answer.headers["location"] == "/dashboard/runs?state=failed"
    cookie = next(each for each in answer.headers.get_list("set-cookie") if "-session=" in each)
    assert {"HttpOnly", "SameSite=lax", "Path=/dashboard", "Max-Age=43200"} <= set(cookie.split("; "))
    assert "bob (read)" in await get(guarded, "")
    assert (await post(guarded, "", "/sign-out")).headers["location"] == "/dashboard/sign-in"
    assert (await guarded.running.client.get("/dashboard")).status_code == 303


@pytest.mark.parametrize(
    "to", ["https://elsewhere.example", "//elsewhere.example", "/dashboard\\..", "/dashboardx", ""]
)
async def test_the_sign_in_leads_nowhere_else(guarded: LocalInstance, to: str) -> None:
    assert (await sign_in(guarded, READ[0], to)).headers["location"] == "/dashboard"


async def test_an_unknown_key_does_not_sign_in(guarded: LocalInstance) -> None:
    answer = await sign_in(guarded, "flotilla_wrong")
    assert answer.status_code == 401
    assert "unknown" in alert(answer.text)
    assert "flotilla_wrong" not in answer.text
    assert (await guarded.running.client.get("/dashboard")).status_code == 303


async def test_a_key_with_the_scope_read_sees_no_payloads_and_changes_nothing(guarded: LocalInstance) -> None:
    run_id = await guarded.trigger("echo", {"secret": "s3cret"})
    await guarded.ended(run_id)
    await sign_in(guarded, READ[0])
    html = await get(guarded, f"/runs/{run_id}")
    assert "s3cret" not in html
    assert "<button>Retry" not in html
    for path in ("/actions/echo/pause", "/actions/echo/resume", "/actions/echo/runs", f"/runs/{run_id}/retry"):
        refused = await post(guarded, "", path)
        assert refused.status_code == 403
        assert "'operate'" in alert(refused.text)
    await sign_in(guarded, OPERATE[0])
    assert "s3cret" in await get(guarded, f"/runs/{run_id}")


async def test_a_cookie_is_refused_if_it_is_changed_expired_or_of_a_removed_key(guarded: LocalInstance) -> None:
    settings = guarded.running.context.settings
    await sign_in(guarded, READ[0])
    name = session.session_cookie(settings)
    cookie = guarded.running.client.cookies[name]
    line = session.line_of_cookie(settings, cookie)
    assert line is not None
    assert line["name"] == "bob"
    forged = (cookie.replace("bob.", "root."), cookie[:-1] + ("0" if cookie[-1] != "0" else "1"), "", "x" * 5000)
    expired = session.signed(settings, line, int(time.time()) - 1)
    for each in (*forged, expired):
        assert session.line_of_cookie(settings, each) is None
    others = Settings.load(database_url=settings.database_url, api_keys=ADMIN[1])
    assert session.line_of_cookie(others, cookie) is None, "the key was removed from the settings"
    elsewhere = Settings.load(database_url="postgresql://u:other@h/d", api_keys=LINES)
    assert session.line_of_cookie(elsewhere, cookie) is None, "the digests alone make no session"


@pytest.mark.parametrize("headers", [{"sec-fetch-site": "cross-site"}, {"origin": "https://elsewhere.example"}])
async def test_a_form_of_another_site_changes_nothing(guarded: LocalInstance, headers: dict[str, str]) -> None:
    await sign_in(guarded, ADMIN[0])
    token = value_of(await get(guarded, "/actions"), "token")
    client = guarded.running.client
    path = "/dashboard/actions/echo/pause"
    for sent in ({}, {"token": "0" * 32}, {"token": "ü"}):
        assert (await client.post(path, data=sent)).status_code == 403
    refused = await client.post(path, data={"token": token}, headers=headers)
    assert refused.status_code == 403
    assert "does not come from a page of the dashboard" in alert(refused.text)
    assert 'class="state active"' in await get(guarded, "/actions/echo")


@pytest.mark.parametrize("content", [b"token=\xff", b"&".join(b"a%d=1" % number for number in range(200))])
async def test_a_form_that_no_page_has_made_is_refused(here: LocalInstance, content: bytes) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = await here.running.client.post("/dashboard/actions/echo/pause", content=content, headers=headers)
    assert answer.status_code == 400
    assert "not a form of the dashboard" in alert(answer.text)
    wrong = await post(here, "/actions/echo", "/actions/echo/runs", key="x" * 10_000, payload="{}")
    assert wrong.status_code == 400


async def test_a_worker_serves_no_dashboard() -> None:
    routes = {getattr(route, "path", "") for route in create_app(Settings.load(role="worker")).routes}
    assert not [path for path in routes if path.startswith("/dashboard")]


# -- what it costs ----------------------------------------------------------------------------------------------------


async def test_many_viewers_cost_one_read_of_each_part(here: LocalInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reads, "MAX_AGE", 3600.0)
    monkeypatch.setattr(cluster_reads, "SLOW_AGE", 3600.0)
    paths = ("", "/actions", "/runs", "/errors", "/coordination")
    await asyncio.gather(*(get(here, path) for path in paths for _ in range(20)))
    # The time, instances, anomalies, history and runnable runs; actions and their last hour; runs; errors; coordination
    # and `once` keys.
    assert here.running.app.state.dashboard.reads == 11


async def test_viewers_share_a_page_but_neither_tokens_nor_nonces(
    guarded: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "KEPT", 3600.0)
    made: list[str] = []
    genuine = page.templates.get_template

    def get_template(name: Any, *others: Any) -> Any:
        made.append(name)
        return genuine(name, *others)

    monkeypatch.setattr(page.templates, "get_template", get_template)
    pages = []
    for key in (OPERATE, OPERATE, READ):
        await sign_in(guarded, key[0])
        made.clear()
        pages.append((await get(guarded, "/actions/echo"), list(made)))
    (first, made_first), (second, made_second), (third, made_third) = pages
    assert ["action.html" in each for each in (made_first, made_second, made_third)] == [True, False, True]
    assert value_of(first, "token") != value_of(second, "token"), "each browser has its own"
    assert value_of(first, "key") != value_of(second, "key"), "each form makes a run of its own"
    assert "Trigger echo" not in third
    assert page.TOKEN not in first + second + third
    assert page.NONCE not in first + second + third


async def test_an_error_on_a_page_leaves_the_open_forms_of_the_browser_valid(here: LocalInstance) -> None:
    token = value_of(await get(here, "/actions"), "token")
    answer = await here.running.client.get("/dashboard/runs/999")
    assert answer.status_code == 404
    assert "set-cookie" not in answer.headers
    assert (await here.running.client.post("/dashboard/actions/echo/pause", data={"token": token})).status_code == 303


async def test_a_page_that_takes_the_database_too_long_says_so(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_reads, "READ_NOW", Statement("SELECT clock_timestamp(), '{}' FROM pg_sleep(60)"))
    monkeypatch.setattr(page, "TIME_LIMIT", 0.1)
    monkeypatch.setattr(cluster_reads, "SLOW_AGE", 3600.0)
    answers = await asyncio.gather(*(get(here, "", 503) for _ in range(20)))
    assert {"did not answer within a second" in alert(answer) for answer in answers} == {True}
    assert here.running.app.state.dashboard.reads == 1, "viewers share a failure: they do not wait one after the other"
    monkeypatch.setattr(page, "TIME_LIMIT", 60.0)
    monkeypatch.setattr(cluster_reads, "READ_NOW", Statement("SELECT clock_timestamp(), '{}'::int[]"))
    here.running.app.state.dashboard.forget()
    await get(here, "")


async def test_a_read_that_began_before_a_change_is_not_shown_after_it() -> None:
    shared, began, go_on = shared_reads.SharedReads(), asyncio.Event(), asyncio.Event()
    state = "before"

    async def read() -> str:
        seen = state
        began.set()
        await go_on.wait()
        return seen

    former = asyncio.create_task(shared.get(a_request(), "state", read))
    await began.wait()
    state = "after"
    shared.forget()
    go_on.set()
    assert await shared.get(a_request(), "state", read) == "after"
    assert await former == "before"


async def test_many_different_pages_share_a_rate_of_statements_and_say_how_old_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_reads, "RATE", 0.0)
    monkeypatch.setattr(shared_reads, "BURST", 5.0)
    shared = shared_reads.SharedReads()

    async def read() -> int:
        return shared.reads

    for key in range(10):
        assert await shared.get(a_request(), key, read, statements=2) == key + 1, "what was never read is read"
    later = a_request()
    assert await shared.get(later, 3, read) == 4, "nothing is saved up: the former read is used"
    assert later.state.age > 0
    monkeypatch.setattr(shared_reads, "MAX_DELAY", 0.0)
    assert await shared.get(a_request(), 3, read) == 11, "but not for ever"
    monkeypatch.setattr(shared_reads, "MAX_DELAY", 3600.0)
    monkeypatch.setattr(shared_reads, "RATE", 1e9)
    assert await shared.get(a_request(), 4, read) == 12


def a_request() -> Any:
    return SimpleNamespace(state=SimpleNamespace())
