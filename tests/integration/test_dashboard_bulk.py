"""The dashboard's runs by filter, failed runs in groups, and changes of all runs that match."""

import re
from collections.abc import AsyncIterator
from html import unescape
from typing import Any

import pytest

from app.fleet.api_keys import make_key
from app.fleet.dashboard import bulk
from app.fleet.runs.cancel import cancel_these
from app.fleet.runs.read import alike, matching
from app.fleet.runs.retry import Retried, retry_these
from tests.integration.test_dashboard import alert, get, post, sign_in, unhurried, value_of
from tests.support.runs import LocalInstance, local_instance

pytestmark = pytest.mark.anyio

READ, OPERATE = make_key("bob", "read"), make_key("alice", "operate")

INSERT = """
INSERT INTO finished_runs (id, action_id, state, priority, run_at, token, attempt, max_attempts, trigger, ordering_key,
                           error, events, created_at, finished_at, expires_at)
SELECT n, (SELECT id FROM actions WHERE name = %s), %s, 0, now(), 1, 1, 1, 'api', %s, %s, 3,
       timestamptz '2026-11-01 00:00+00' + n * interval '1 s', now(), now() + interval '1 d'
FROM generate_series(%s::int, %s::int) AS n
"""


@pytest.fixture(autouse=True)
def no_time_limit_and_no_shared_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch)


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    """An instance on which no run begins by itself: what is pending stays pending."""
    async with local_instance(address) as own:
        await own.sql("UPDATE actions SET paused_at = now()")
        yield own


async def insert(
    here: LocalInstance,
    ids: tuple[int, int],
    *,
    action: str = "echo",
    state: str = "failed",
    error: str | None = "ValueError: no",
    ordering_key: str | None = None,
) -> None:
    await here.sql(INSERT, action, state, ordering_key, error, *ids)


async def states(here: LocalInstance, action: str = "echo") -> dict[str, int]:
    found = await here.sql(
        "SELECT state, count(*) FROM (SELECT action_id, state FROM runs UNION ALL SELECT action_id, state FROM "
        "finished_runs) AS r JOIN actions AS a ON a.id = r.action_id AND a.name = %s GROUP BY state",
        action,
    )
    return dict(found)


def shown(html: str) -> list[int]:
    """Return the ids of the listed runs."""
    return [int(each) for each in re.findall(r'<td><a href="/dashboard/runs/(\d+)">', html)]


def link(html: str, text: str) -> str:
    """Return where the link with this text leads, below /dashboard."""
    found = re.search(rf'href="/dashboard([^"]*)">{re.escape(text)}', html)
    assert found is not None, html
    return unescape(found[1])


async def change(here: LocalInstance, preview: str) -> str:
    """Send the form of a preview, and return the page that follows."""
    html = await get(here, preview)
    found = re.search(r'<form method="post" action="/dashboard(/changes/[^"]*)"', html)
    assert found is not None, html
    answer = await here.running.client.post(f"/dashboard{unescape(found[1])}", data={"token": value_of(html, "token")})
    assert answer.status_code == 200, answer.text
    return answer.text


# -- groups of errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        ("ValueError: no customer 17", "ValueError: no customer 4711", True),
        ("KeyError: 'alice'", "KeyError: 'bob the builder'", True),
        ('Refused: "a" by alice@example.org', 'Refused: "b" by bob@example.org', True),
        ("at 2026-11-20T08:30:00Z in 0b1e4c5a-77aa", "at 2026-11-20T09:31:00Z in 9c00ffee-1234", True),
        ("the host can't be reached: 'a'", "the host can't be reached: 'b'", True),
        ("x" * 500 + "one", "x" * 500 + "other", True),
        ("ValueError: no customer", "TypeError: no customer", False),
        ("ValueError: no customer", "ValueError: no vendor", False),
        ("ValueError: zu wenig Größe", "ValueError: zu wenig Länge", False),
    ],
)
async def test_errors_are_alike_without_what_varies(here: LocalInstance, one: str, other: str, are_alike: bool) -> None:
    await insert(here, (1, 1), error=one)
    await insert(here, (2, 2), error=other)
    ((groups,),) = await here.sql("SELECT count(DISTINCT alike) FROM finished_runs")
    assert groups == (1 if are_alike else 2)


async def test_only_failed_runs_have_a_group(here: LocalInstance) -> None:
    await insert(here, (1, 1), state="succeeded", error=None)
    await insert(here, (2, 2), state="cancelled", error="cancelled on request")
    assert "No failed runs" in await get(here, "/errors")
    await insert(here, (3, 3), error=None)
    assert "(no text)" in await get(here, "/errors")


async def test_a_bad_deploy_is_one_line_and_is_retried_by_two_clicks(here: LocalInstance) -> None:
    for number in range(5):
        first = number * 1000 + 1
        await insert(here, (first, first + 999), error=f"AttributeError: run {number} has no 'name{number}'")
    await insert(here, (9001, 9001), error="ValueError: another reason")
    await insert(here, (9002, 9002), action="nap", error="AttributeError: run 1 has no 'name1'")
    html = await get(here, "/errors?action=echo")
    assert re.findall(r"/dashboard/runs\?action=echo&amp;alike=[-\d]+\">([^<]*)<", html) == ["1", "1,000+"]
    many = html[html.index("1,000+") :]
    preview = await get(here, link(many, "Retry all"))
    assert "<strong>1,000+ runs</strong> of echo with the same error." in preview
    answer = await change(here, link(many, "Retry all"))
    assert "5,000 runs of echo are pending again." in answer
    assert await states(here) == {"pending": 5000, "failed": 1}
    assert await states(here, "nap") == {"failed": 1}
    assert "No run matches any more" in await get(here, link(many, "Retry all"))


async def test_more_groups_than_are_shown_are_mentioned(here: LocalInstance) -> None:
    await here.sql(INSERT.replace("%s, 3,\n", "repeat('a', n), 3,\n"), "echo", "failed", None, 1, alike.MOST + 1)
    html = await get(here, "/errors")
    assert f"Only {alike.MOST} groups are shown" in html
    assert html.count("Retry all") == alike.MOST
    await here.sql("DELETE FROM finished_runs WHERE id = 1")
    assert "groups are shown" not in await get(here, "/errors")


# -- filters ----------------------------------------------------------------------------------------------------------


async def test_runs_are_found_by_each_filter_and_by_all_together(here: LocalInstance) -> None:
    await insert(here, (1, 1), error="ValueError: the Harbour is closed")
    await insert(here, (2, 2), error="100% of the harbour", ordering_key="ship-1")
    await insert(here, (3, 3), action="nap", error="ValueError: harbour", ordering_key="ship-1")
    await here.sql("SELECT setval('runs_id_seq', 100)")
    keyed = await here.trigger("echo", key="invoice-7")
    other = await here.trigger("nap", key="invoice-7")
    ordered = await here.trigger("echo", ordering_key="ship-1")
    assert shown(await get(here, "/runs?words=HARBOUR")) == [3, 2, 1]
    assert shown(await get(here, "/runs?words=100%25")) == [2], "the words are no pattern"
    assert shown(await get(here, "/runs?key=invoice-7")) == [other, keyed]
    assert shown(await get(here, "/runs?key=invoice-7&action=nap")) == [other]
    assert shown(await get(here, "/runs?key=invoice-7&state=failed")) == []
    assert shown(await get(here, "/runs?ordering_key=ship-1")) == [ordered, 3, 2]
    assert shown(await get(here, "/runs?ordering_key=ship-1&state=failed&action=nap&words=value")) == [3]
    ((mark,),) = await here.sql("SELECT alike FROM finished_runs WHERE id = 3")
    assert shown(await get(here, f"/runs?action=nap&alike={mark}")) == [3]
    assert shown(await get(here, f"/runs?action=nap&alike={mark}&words=closed")) == []
    html = await get(here, "/runs?words=harbour&action=echo")
    assert 'name="words" value="harbour"' in html
    assert '<details id="more-filters" open>' in html


async def test_runs_are_found_by_time(here: LocalInstance) -> None:
    # One run for each second, with gaps.
    await insert(here, (10, 19))
    await insert(here, (40, 49), action="nap")
    assert shown(await get(here, "/runs?since=2026-11-01T00:00:45")) == [49, 48, 47, 46, 45]
    assert shown(await get(here, "/runs?until=2026-11-01T00:00:12")) == [11, 10]
    assert shown(await get(here, "/runs?since=2026-11-01T00:00:18&until=2026-11-01T00:00:41")) == [40, 19, 18]
    assert shown(
        await get(here, "/runs?since=2026-11-01T00:00:18&action=nap&state=failed&until=2026-11-01T00:00:42")
    ) == [
        41,
        40,
    ]
    assert shown(await get(here, "/runs?since=2030-01-01T00:00")) == []
    assert len(shown(await get(here, "/runs?since=2020-01-01T00:00"))) == 20


async def test_a_search_ends_after_a_window_and_goes_on(here: LocalInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "WINDOW", 10)
    await insert(here, (1, 1), error="found")
    await insert(here, (2, 25), error="another")
    html = await get(here, "/runs?words=found")
    assert "None of the runs down to 16 matches." in html
    html = await get(here, link(html, "Search older runs"))
    assert "None of the runs down to 6 matches." in html
    html = await get(here, link(html, "Search older runs"))
    assert shown(html) == [1]
    assert "Search older runs" not in html


async def test_pages_of_a_group_are_complete(here: LocalInstance) -> None:
    await insert(here, (1, 101))
    ((mark,),) = await here.sql("SELECT DISTINCT alike FROM finished_runs")
    html = await get(here, f"/runs?action=echo&alike={mark}")
    found = shown(html)
    while "Older" in html:
        html = await get(here, link(html, "Older"))
        found += shown(html)
    assert found == list(range(101, 0, -1))


@pytest.mark.parametrize(
    "query",
    [
        "state=unknown",
        "alike=1",
        "alike=1&action=echo&state=succeeded",
        "alike=99999999999999999999&action=echo",
        "words=%00",
        "since=yesterday",
        "since=2026-13-01T00:00",
        "until=2026-11-01",
        f"words={'x' * 501}",
        "before=-1",
    ],
)
async def test_a_wrong_filter_is_a_page_that_says_so(here: LocalInstance, query: str) -> None:
    answer = await here.running.client.get(f"/dashboard/runs?{query}")
    assert answer.status_code in {400, 422}
    assert alert(answer.text)


# -- changes of all runs that match -----------------------------------------------------------------------------------


async def test_all_pending_runs_are_cancelled_except_those_that_came_later(here: LocalInstance) -> None:
    ids = [await here.trigger("echo") for _ in range(3)]
    other = await here.trigger("nap")
    preview = link(await get(here, "/runs?action=echo&state=pending"), "Cancel all that match")
    html = await get(here, preview)
    assert "<strong>3 runs</strong> of echo in the state pending." in html
    assert ">Cancel 3 runs</button>" in html
    later = await here.trigger("echo")
    found = re.search(r'action="/dashboard(/changes/[^"]*)"', html)
    assert found is not None
    answer = await here.running.client.post(f"/dashboard{unescape(found[1])}", data={"token": value_of(html, "token")})
    assert "3 runs of echo are cancelled." in answer.text
    assert {(await here.read(each)).state for each in ids} == {"cancelled"}
    assert {(await here.read(each)).state for each in (later, other)} == {"pending"}


async def test_a_pending_run_that_begins_before_the_change_is_left_out(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await here.trigger("nap", {"seconds": 3600})

    async def begin_first(*given: Any) -> list[int]:
        await here.running.client.post("/actions/nap/resume")
        await here.attempt(run_id)
        return await cancel_these(*given)

    monkeypatch.setattr(bulk, "cancel_these", begin_first)
    assert "0 runs of nap are cancelled." in await change(here, "/changes/cancel?action=nap&state=pending")
    assert await here.sql("SELECT cancel_requested_at FROM runs") == [(None,)]


async def test_all_running_runs_are_cancelled(here: LocalInstance) -> None:
    await here.sql("UPDATE actions SET paused_at = NULL")
    ids = [await here.trigger("nap", {"seconds": 3600}) for _ in range(2)]
    for each in ids:
        await here.attempt(each)
    answer = await change(here, "/changes/cancel?action=nap&state=running")
    assert "2 runs of nap will be cancelled as soon as their action lets them." in answer
    assert {(await here.ended(each)).state for each in ids} == {"cancelled"}


async def test_a_failed_run_that_is_cancelled_before_the_change_stays_cancelled(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(here, (1, 2))

    async def cancel_first(*given: Any) -> Retried:
        await here.sql("UPDATE finished_runs SET state = 'cancelled' WHERE id = 1 RETURNING 1")
        return await retry_these(*given)

    monkeypatch.setattr(bulk, "retry_these", cancel_first)
    assert "1 run of echo is pending again." in await change(here, "/changes/retry?action=echo&state=failed")
    assert await states(here) == {"pending": 1, "cancelled": 1}


async def test_a_change_has_a_limit_and_says_whether_more_runs_match(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MOST", 10)
    monkeypatch.setattr(bulk, "BATCH", 4)
    await insert(here, (1, 25), state="cancelled", error=None)
    answer = await change(here, "/changes/retry?action=echo&state=cancelled")
    assert "10 runs of echo are pending again." in answer
    answer = await change(here, link(answer, "Retry those"))
    answer = await change(here, link(answer, "Retry those"))
    assert "5 runs of echo are pending again." in answer
    assert "Older runs may match" not in answer
    assert await states(here) == {"pending": 25}


async def test_an_action_that_allows_one_run_at_a_time_gets_one(here: LocalInstance) -> None:
    await here.sql("UPDATE actions SET overlap = 'skip' WHERE name = 'echo'")
    await insert(here, (1, 3))
    answer = await change(here, "/changes/retry?action=echo&state=failed")
    assert "1 run of echo is pending again." in answer
    assert "2 were left out" in answer
    answer = await change(here, "/changes/retry?action=echo&state=failed")
    assert "0 runs of echo are pending again." in answer
    assert await states(here) == {"pending": 1, "failed": 2}


@pytest.mark.parametrize(
    "path",
    ["retry?action=echo", "retry?state=failed", "cancel?action=echo&state=failed", "retry?action=echo&state=pending"],
)
async def test_what_cannot_be_changed_is_refused(here: LocalInstance, path: str) -> None:
    await insert(here, (1, 1))
    assert "can be retried if" in alert(await get(here, f"/changes/{path}", 400))
    answer = await post(here, "/actions", f"/changes/{path}")
    assert answer.status_code == 400
    assert await states(here) == {"failed": 1}


async def test_a_key_with_the_scope_read_sees_groups_and_changes_nothing(address: str) -> None:
    lines = ",".join(line for _, line in (READ, OPERATE))
    async with local_instance(address, api_keys=lines) as here:
        await insert(here, (1, 1))
        await sign_in(here, READ[0])
        assert "Retry all" not in await get(here, "/errors")
        assert "all that match" not in await get(here, "/runs?action=echo&state=failed")
        await get(here, "/changes/retry?action=echo&state=failed", 403)
        answer = await post(here, "/errors", "/changes/retry?action=echo&state=failed")
        assert answer.status_code == 403
        assert await states(here) == {"failed": 1}
        await sign_in(here, OPERATE[0])
        assert "Retry all" in await get(here, "/errors")
