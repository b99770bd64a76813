"""Runs over HTTP: batches, single runs, pages, cancellations and retries."""

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Connection
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.execute.attempt import Ending
from app.fleet.runs import retry
from app.fleet.runs.read import pages, records
from app.fleet.runs.read.records import RunRecord
from tests.integration.test_actions_http import RUN, count_runs, get, post
from tests.integration.test_edge import is_problem
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio
FAR = datetime(2999, 1, 1, tzinfo=UTC)


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address) as own:
        yield own


async def ids(here: LocalInstance, query: str) -> list[int]:
    return [run["id"] for run in (await get(here, f"/runs?{query}"))["items"]]


# -- batches ----------------------------------------------------------------------------------------------------------


async def test_a_batch_is_answered_with_its_runs_in_the_same_order(here: LocalInstance) -> None:
    orders: list[dict[str, Any]] = [
        {"action": "echo", "payload": {"n": 0}},
        {"action": "weigh", "payload": {"weight": 1}, "key": "mine"},
        {"action": "echo", "payload": {"n": 2}, "priority": 9, "run_at": "2020-01-01T00:00:00Z"},
        {"action": "alone", "payload": {"seconds": 0}},
    ]
    answer = await post(here, "/runs:batch", {"runs": orders}, 202)
    made = answer.json()["runs"]
    assert all(set(run) == RUN and run["trigger"] == "api" for run in made)
    assert [run["action"] for run in made] == ["echo", "weigh", "echo", "alone"]
    assert [run["payload"].get("n") for run in made] == [0, None, 2, None]
    assert [(await here.ended(run["id"])).state for run in made] == ["succeeded"] * 4


async def test_a_batch_of_a_thousand_runs_is_accepted_and_a_larger_one_refused_completely(here: LocalInstance) -> None:
    await post(here, "/actions/noop/pause", status=200)
    orders = [{"action": "noop"}] * 1000
    made = (await post(here, "/runs:batch", {"runs": orders}, 202)).json()["runs"]
    assert len({run["id"] for run in made}) == 1000 == await count_runs(here)
    for refused in ([*orders, {"action": "noop"}], []):
        problem = is_problem(await post(here, "/runs:batch", {"runs": refused}), "invalid")
        assert [each["field"] for each in problem["errors"]] == ["runs"]  # type: ignore[attr-defined]
    assert await count_runs(here) == 1000


async def test_a_batch_over_the_body_limit_is_refused_completely(address: str) -> None:
    async with local_instance(address, max_body=2048) as here:
        orders = [{"action": "echo", "payload": {"text": "x" * 100}}] * 20
        is_problem(await post(here, "/runs:batch", {"runs": orders}), "payload-too-large")
        assert await count_runs(here) == 0


async def test_one_invalid_run_refuses_the_batch_and_each_invalid_field_is_named_with_its_index(
    here: LocalInstance,
) -> None:
    good = {"action": "weigh", "payload": {"weight": 1}}
    orders = [good, {"action": "weigh", "payload": {}}, good, {"action": "weigh", "payload": {"weight": "s3cret"}}]
    answer = await post(here, "/runs:batch", {"runs": orders})
    problem = is_problem(answer, "invalid")
    fields = [each["field"] for each in problem["errors"]]  # type: ignore[attr-defined]
    assert fields == ["runs.1.payload.weight", "runs.3.payload.weight"]
    assert "runs.3.payload.weight" in str(problem["detail"])
    assert "s3cret" not in answer.text
    for field, value in (("priority", 5000), ("run_at", "soon"), ("key", ""), ("paylod", {})):
        wrong: dict[str, Any] = {"action": "noop", field: value}
        problem = is_problem(await post(here, "/runs:batch", {"runs": [good, wrong]}), "invalid")
        assert [each["field"] for each in problem["errors"]] == [f"runs.1.{field}"]  # type: ignore[attr-defined]
    problem = is_problem(await post(here, "/runs:batch", {"runs": [{}]}), "invalid")
    assert [each["field"] for each in problem["errors"]] == ["runs.0.action"]  # type: ignore[attr-defined]
    assert await count_runs(here) == 0


async def test_an_unknown_action_refuses_the_batch_and_is_named_with_its_index(here: LocalInstance) -> None:
    orders = [{"action": "noop"}, {"action": "none-such"}, {"action": "weigh", "payload": {}}]
    problem = is_problem(await post(here, "/runs:batch", {"runs": orders}), "not-found")
    assert problem["errors"] == [{"field": "runs.1.action", "message": "there is no action 'none-such'"}]
    assert await count_runs(here) == 0


async def test_an_active_run_of_an_action_with_overlap_skip_refuses_the_batch(here: LocalInstance) -> None:
    active = await here.trigger("alone", {"seconds": 60})
    before = await count_runs(here)
    problem = is_problem(
        await post(here, "/runs:batch", {"runs": [{"action": "noop"}, {"action": "alone"}]}), "conflict"
    )
    assert problem["run"] == active
    assert await count_runs(here) == before
    await post(here, f"/runs/{active}/cancel", status=200)


async def test_two_orders_of_a_batch_with_the_same_key_are_one_run(here: LocalInstance) -> None:
    orders = [{"action": "noop", "key": "k"}, {"action": "echo", "key": "k"}, {"action": "noop", "key": "k"}]
    first, second, third = (await post(here, "/runs:batch", {"runs": orders}, 202)).json()["runs"]
    assert first == third
    assert first["id"] != second["id"]


async def test_a_batch_whose_keys_all_have_runs_returns_these_runs_in_their_present_state(here: LocalInstance) -> None:
    orders = [{"action": "echo", "payload": {"n": n}, "key": f"k{n}"} for n in range(3)]
    made = (await post(here, "/runs:batch", {"runs": orders}, 202)).json()["runs"]
    for run in made:
        await here.ended(run["id"])
    again = (await post(here, "/runs:batch", {"runs": orders[::-1]}, 200)).json()["runs"]
    assert [run["id"] for run in again] == [run["id"] for run in made[::-1]]
    assert [run["result"] for run in again] == [{"n": 2}, {"n": 1}, {"n": 0}]
    await post(here, "/runs:batch", {"runs": [*orders, {"action": "noop"}]}, 202)


async def test_a_batch_is_inserted_with_one_statement_whatever_its_size(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    await post(here, "/actions/noop/pause", status=200)
    genuine, inserts = psycopg.AsyncConnection.execute, list[bytes]()

    async def recorded(connection: Any, query: Any, *given: Any, **more: Any) -> Any:
        # Without the scheduler's insert, which it sends once when it starts.
        # A connection that is opened late has its settings sent as a text.
        sent = query.encode() if isinstance(query, str) else query
        if re.search(rb"INSERT INTO \S+\.runs ", sent) and b"slot:" not in sent:
            inserts.append(sent)
        return await genuine(connection, query, *given, **more)

    monkeypatch.setattr(psycopg.AsyncConnection, "execute", recorded)
    body = {"runs": [{"action": "noop", "payload": {"n": n}} for n in range(1000)]}
    await post(here, "/runs:batch", body, 202)
    assert len(inserts) == 1


# -- reading ----------------------------------------------------------------------------------------------------------


async def test_a_run_has_the_documented_fields_and_no_others(here: LocalInstance) -> None:
    ended = await here.run("weigh", {"weight": 3})
    run = await get(here, f"/runs/{ended.id}")
    assert set(run) == RUN
    me = (await get(here, "/health/instances"))["self"]
    assert (run["state"], run["result"], run["attempt"], run["instance"]) == ("succeeded", 3, 1, me)
    assert run["created_at"] <= run["started_at"] <= run["finished_at"]


async def test_a_failed_run_shows_its_error(here: LocalInstance) -> None:
    ended = await here.run("give-up")
    run = await get(here, f"/runs/{ended.id}")
    assert run["state"] == "failed"
    assert "there is no such parcel" in run["error"]


async def test_a_malformed_run_id_is_400_and_an_unknown_one_404(here: LocalInstance) -> None:
    for path in ("/runs/{}", "/runs/{}/cancel", "/runs/{}/retry"):
        method = "GET" if path == "/runs/{}" else "POST"
        for malformed in ("x", "-1", "1.0", "0x1", "%D9%A1", "1%20", "1e3"):
            is_problem(await here.running.client.request(method, path.format(malformed)), "bad-request")
        for unknown in (0, 4711, 2**63 - 1, 2**63, "9" * 5000):
            is_problem(await here.running.client.request(method, path.format(unknown)), "not-found")


async def test_pages_list_each_run_once_from_the_newest_to_the_oldest(here: LocalInstance) -> None:
    await post(here, "/actions/echo/pause", status=200)
    made = [(await here.run("noop")).id if n % 2 else await here.trigger("echo") for n in range(7)]
    seen: list[int] = []
    query = "limit=3"
    for expected in (3, 3, 1):
        page = await get(here, f"/runs?{query}")
        assert len(page["items"]) == expected
        assert all(set(run) == RUN | {"truncated"} for run in page["items"])
        seen += [run["id"] for run in page["items"]]
        query = f"limit=3&cursor={page['next_cursor']}"
        await here.trigger("echo")
    assert seen == made[::-1]
    assert page["next_cursor"] is None


async def test_the_last_page_has_no_cursor_even_if_it_is_full(here: LocalInstance) -> None:
    await here.trigger_all([])
    for _ in range(4):
        await here.run("noop")
    first = await get(here, "/runs?limit=2")
    assert first["next_cursor"] is not None
    assert (await get(here, f"/runs?limit=2&cursor={first['next_cursor']}"))["next_cursor"] is None


async def test_without_runs_the_page_is_empty(here: LocalInstance) -> None:
    assert await get(here, "/runs") == {"items": [], "next_cursor": None}


async def test_runs_can_be_filtered_by_action_and_state(here: LocalInstance) -> None:
    good, bad = (await here.run("noop")).id, (await here.run("give-up")).id
    await post(here, "/actions/noop/pause", status=200)
    waiting = await here.trigger("noop")
    cancelled = await here.trigger("noop")
    await post(here, f"/runs/{cancelled}/cancel", status=200)
    assert await ids(here, "action=noop") == [cancelled, waiting, good]
    assert await ids(here, "action=noop&state=succeeded") == [good]
    assert await ids(here, "state=failed") == [bad]
    assert await ids(here, "state=pending") == [waiting]
    assert await ids(here, "state=running") == []
    assert await ids(here, "state=pending,failed") == await ids(here, "state=failed&state=pending") == [waiting, bad]
    assert await ids(here, "state=pending,running,succeeded,failed,cancelled") == [cancelled, waiting, bad, good]
    assert await ids(here, "action=echo") == []


async def test_a_page_has_fifty_runs_by_default_and_at_most_five_hundred(here: LocalInstance) -> None:
    await post(here, "/actions/noop/pause", status=200)
    await post(here, "/runs:batch", {"runs": [{"action": "noop"}] * 501}, 202)
    assert len(await ids(here, "")) == 50
    assert len(await ids(here, "limit=500")) == 500
    for limit in ("0", "501", "-1", "many", ""):
        problem = is_problem(await here.running.client.get(f"/runs?limit={limit}"), "invalid")
        assert [each["field"] for each in problem["errors"]] == ["query.limit"]  # type: ignore[attr-defined]


async def test_invalid_filters_and_cursors_are_refused(here: LocalInstance) -> None:
    for state in ("done", "pending,done", "", "PENDING"):
        problem = is_problem(await here.running.client.get(f"/runs?state={state}"), "invalid")
        assert [each["field"] for each in problem["errors"]] == ["query.state"]  # type: ignore[attr-defined]
    is_problem(await here.running.client.get("/runs?action=none-such"), "not-found")
    foreign = ("", "x", "17", "YmVmb3JlIHg", "YmVmb3JlIDk5OTk5OTk5OTk5OTk5OTk5OTk", "%00", "%C3%BC")
    for cursor in foreign:
        is_problem(await here.running.client.get(f"/runs?cursor={cursor}"), "bad-request")


async def test_failed_runs_are_found_by_an_index(here: LocalInstance) -> None:
    """There is one failure in the long history of a busy action, and a scan of this history would take seconds."""
    await here.sql(
        """
        INSERT INTO finished_runs (id, action_id, state, priority, run_at, token, attempt, max_attempts, trigger,
                                   events, created_at, finished_at, expires_at)
        SELECT i, a.id, CASE WHEN i = 1 THEN 'failed' ELSE 'succeeded' END, 0, now(), 1, 1, 1, 'api', 0, now(), now(),
               now() + interval '1 day'
        FROM generate_series(1, 30000) AS i, actions AS a
        WHERE a.name = 'noop'
        """
    )
    database = here.running.context.database
    async with database.connection() as connection:
        number = here.engine.catalogue.id_of("noop")
        found = await pages.find_page(connection, database.namespace, action_id=number, states=["failed"])
        read = await connection.execute(
            "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'finished_runs'"
        )
        assert [run.id for run in found] == [1]
        assert (await read.fetchone() or (0,))[0] < 1000


# -- cancellations and retries ----------------------------------------------------------------------------------------


async def test_a_pending_run_is_cancelled_at_once(here: LocalInstance) -> None:
    await post(here, "/actions/noop/pause", status=200)
    waiting = await here.trigger("noop")
    run = (await post(here, f"/runs/{waiting}/cancel", status=200)).json()
    assert (run["id"], run["state"]) == (waiting, "cancelled")
    assert run == await get(here, f"/runs/{waiting}")


async def test_cancelling_a_running_run_ends_its_attempt(here: LocalInstance) -> None:
    running = await here.trigger("nap", {"seconds": 60})
    await here.until(running, "running")
    run = (await post(here, f"/runs/{running}/cancel", status=200)).json()
    assert run["id"] == running
    assert (await here.ended(running)).state == "cancelled"


async def test_a_run_that_has_ended_cannot_be_cancelled(here: LocalInstance) -> None:
    ended = await here.run("noop")
    problem = is_problem(await post(here, f"/runs/{ended.id}/cancel"), "conflict")
    assert "succeeded" in str(problem["detail"])


async def test_a_failed_run_is_retried_with_the_same_id(here: LocalInstance) -> None:
    failed = await here.run("give-up")
    run = (await post(here, f"/runs/{failed.id}/retry", status=200)).json()
    assert (run["id"], run["state"], run["attempt"]) == (failed.id, "pending", 0)
    assert (await here.ended(failed.id)).state == "failed"


async def test_a_run_that_fails_during_the_request_is_retried(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is running when the retry reads the finished runs, and has ended before the retry reads the response."""
    run_id, genuine = await here.trigger("nap", {"seconds": 3600}), records.find
    await here.attempt(run_id)

    async def fail_first(connection: Connection, namespace: Namespace, identifier: int) -> RunRecord:
        if attempt := here.engine.executor.attempts.get(identifier):
            await post(here, "/actions/nap/pause", status=200)
            here.engine.executor._end(attempt, Ending.TIMEOUT)
            attempt.max_attempts = 1
            await here.ended(identifier)
        return await genuine(connection, namespace, identifier)

    monkeypatch.setattr(retry, "find", fail_first)
    retried = (await post(here, f"/runs/{run_id}/retry", status=200)).json()
    assert (retried["id"], retried["state"], retried["attempt"]) == (run_id, "pending", 0)


async def test_a_cancellation_holds_no_row_lock_while_its_response_is_read(
    here: LocalInstance, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, genuine = await here.trigger("nap", {"seconds": 3600}), records.find
    await here.attempt(run_id)

    async def find(connection: Connection, namespace: Namespace, identifier: int) -> RunRecord:
        with psycopg.connect(address) as other:
            other.execute("SELECT FROM flotilla.runs WHERE id = %s FOR UPDATE NOWAIT", [identifier])
        return await genuine(connection, namespace, identifier)

    monkeypatch.setattr(records, "find", find)
    await post(here, f"/runs/{run_id}/cancel", status=200)


async def test_a_succeeded_run_cannot_be_retried(here: LocalInstance) -> None:
    ended = await here.run("noop")
    problem = is_problem(await post(here, f"/runs/{ended.id}/retry"), "conflict")
    assert "succeeded" in str(problem["detail"])


async def test_a_retry_of_many_runs_retries_only_failed_runs_within_the_given_time(here: LocalInstance) -> None:
    failed = [(await here.run("give-up")).id for _ in range(4)]
    (cancelled,) = [await here.trigger("noop", run_at=FAR)]
    await post(here, f"/runs/{cancelled}/cancel", status=200)
    other, good = await here.run("quit"), await here.run("noop")
    await here.sql("UPDATE finished_runs SET finished_at = now() - interval '3 hours' WHERE id = %s", failed[0])
    await post(here, "/actions/give-up/pause", status=200)

    again = (await post(here, "/runs:retry", {"action": "give-up", "since": "2h", "limit": 2}, 200)).json()
    assert again == {"retried": 2, "more": True}
    again = (await post(here, "/runs:retry", {"action": "give-up", "since": 7200}, 200)).json()
    assert again == {"retried": 1, "more": False}
    states = {run.id: (run.state, run.attempt) for run in [await here.read(each) for each in failed]}
    assert states == dict.fromkeys(failed[1:], ("pending", 0)) | {failed[0]: ("failed", 1)}
    assert [(await here.read(each)).state for each in (cancelled, other.id, good.id)] == [
        "cancelled",
        "failed",
        "succeeded",
    ]

    again = (await post(here, "/runs:retry", {"action": "give-up", "until": "2h"}, 200)).json()
    assert again == {"retried": 1, "more": False}
    both = {"action": "noop", "state": ["failed", "cancelled"]}
    assert (await post(here, "/runs:retry", both, 200)).json() == {"retried": 1, "more": False}
    assert (await here.ended(cancelled)).state == "succeeded"


async def test_a_run_that_fails_again_is_not_retried_twice_by_the_same_request(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = [(await here.run("give-up")).id for _ in range(3)]
    monkeypatch.setattr(retry, "BATCH", 1)
    again = (await post(here, "/runs:retry", {"action": "give-up"}, 200)).json()
    assert again == {"retried": 3, "more": False}
    for run_id in failed:
        assert (await here.ended(run_id)).state == "failed"


async def test_concurrent_requests_retry_each_run_only_once(here: LocalInstance) -> None:
    await here.trigger_all([Order("give-up")] * 50)

    async def all_failed() -> bool:
        return await here.sql("SELECT count(*) FROM finished_runs") == [(50,)]

    await soon(all_failed)
    await post(here, "/actions/give-up/pause", status=200)
    requests = [post(here, "/runs:retry", {"action": "give-up"}, 200) for _ in range(4)]
    assert sum(answer.json()["retried"] for answer in await asyncio.gather(*requests)) == 50


async def test_a_retry_of_many_runs_retries_one_run_of_an_action_with_overlap_skip(here: LocalInstance) -> None:
    await post(here, "/actions/alone/pause", status=200)
    ended = []
    for _ in range(3):
        ended.append(await here.trigger("alone"))
        await post(here, f"/runs/{ended[-1]}/cancel", status=200)
    body = {"action": "alone", "state": ["cancelled"]}
    assert (await post(here, "/runs:retry", body, 200)).json() == {"retried": 1, "more": False, "left_out": 2}
    problem = is_problem(await post(here, f"/runs/{ended[1]}/retry"), "conflict")
    assert problem["run"] == ended[0]


@pytest.mark.parametrize(
    ("body", "kind", "field"),
    [
        ({"action": "nothing"}, "not-found", None),
        ({}, "invalid", "action"),
        ({"action": "noop", "state": ["succeeded"]}, "invalid", "state.0"),
        ({"action": "noop", "state": []}, "invalid", "state"),
        ({"action": "noop", "since": "soon"}, "invalid", "since"),
        ({"action": "noop", "since": -1}, "invalid", "since"),
        ({"action": "noop", "until": 1e300}, "invalid", "until"),
        ({"action": "noop", "limit": 0}, "invalid", "limit"),
        ({"action": "noop", "ids": [1]}, "invalid", "ids"),
    ],
)
async def test_an_invalid_retry_of_many_runs_is_refused(
    here: LocalInstance, body: dict[str, Any], kind: str, field: str | None
) -> None:
    problem = is_problem(await post(here, "/runs:retry", body), kind)
    if field is not None:
        assert [each["field"] for each in problem["errors"]] == [field]  # type: ignore[attr-defined]
