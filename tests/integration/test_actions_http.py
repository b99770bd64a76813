"""Actions over HTTP: the fields of an action, the responses to triggers, and the effects of pausing and resuming."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from app.fleet import InSession, Run, action, trigger
from app.fleet.api_keys import make_key
from app.fleet.cluster.registry import Registration, Registry
from app.fleet.edge.problems import BY_STATUS
from app.fleet.engine.actions import admin
from app.fleet.engine.dispatch.scheduler import READ_UNLOCKED
from app.fleet.engine.maintenance.reconciler import Reconciler
from tests.integration.test_edge import is_problem
from tests.support.engine_harness import NAMESPACE
from tests.support.postgres import BOUND
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio

RUN = {
    *("id", "action", "state", "trigger", "payload", "scheduled_for", "run_at", "attempt", "max_attempts", "instance"),
    *("ordering_key", "result", "error", "progress", "triggered_by", "request_id", "trace_id"),
    *("created_at", "started_at", "finished_at"),
}
ACTION = {
    *("name", "summary", "schedule", "state", "next_run_at", "last_run", "running_on", "standby", "overlap", "misfire"),
    *("priority", "max_attempts", "concurrency", "rate", "burst", "retention"),
}
MODULES = ("tests.support.trial_actions", "tests.integration.test_actions_http")

INVALID: list[tuple[str, Any]] = [
    ("key", ""),
    ("key", "k" * 201),
    ("key", "a\nb"),
    ("key", "a\x00b"),
    ("key", 7),
    ("priority", 1001),
    ("priority", -1001),
    ("priority", 1.5),
    ("priority", "1"),
    ("priority", True),
    ("run_at", "2030-01-01T00:00:00"),
    ("run_at", "soon"),
    ("run_at", 1893456000),
    ("run_at", "9999-12-31T23:59:59-12:00"),
    ("run_at", "0001-01-01T00:00:00+12:00"),
    ("prio", 1),
]


@action("seldom", every="10h", misfire="skip", jitter="1s")
async def seldom(_: Run) -> None:
    """Run when the test makes it due.

    A second paragraph is not part of the summary.
    """


@action("urgent", priority=7, retention="36h", rate="100/h", burst=5, concurrency=3, retries=1)
async def urgent(_: Run) -> None: ...


@action("count")
async def count(run: Run[int]) -> int:
    return run.payload


@action("names")
async def names(run: Run[list[str]]) -> list[str]:
    return run.payload


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address, actions=MODULES) as own:
        yield own


async def get(here: LocalInstance, path: str, status: int = 200) -> Any:
    answer = await here.running.client.get(path)
    assert answer.status_code == status, answer.text
    return answer.json()


async def post(
    here: LocalInstance, path: str, body: Any = None, status: int | None = None, **given: Any
) -> httpx.Response:
    answer = await here.running.client.post(path, json=body, **given)
    assert status is None or answer.status_code == status, answer.text
    return answer


async def send(here: LocalInstance, content: bytes, content_type: str = "application/json") -> httpx.Response:
    headers = {"content-type": content_type}
    return await here.running.client.post("/actions/echo/runs", content=content, headers=headers)


async def count_runs(here: LocalInstance) -> int:
    ((there,),) = await here.sql("SELECT (SELECT count(*) FROM runs) + (SELECT count(*) FROM finished_runs)")
    return int(there)


async def insert_action_of_another_release(here: LocalInstance) -> None:
    await here.sql(
        """
        INSERT INTO actions (name, schedule, misfire, overlap, priority, max_attempts, retention, next_run_at)
        VALUES ('brand-new', 'every 1h', 'once', 'allow', 0, 1, '7d', now() + interval '1 hour')
        """
    )


@pytest.fixture
async def newer(here: LocalInstance, address: str) -> AsyncIterator[None]:
    """A living instance of a newer release with the action `brand-new`. It holds its presence lock, so it stays."""
    await insert_action_of_another_release(here)
    with psycopg.connect(address, autocommit=True) as session:
        registration = Registration(uuid4(), "elsewhere", 1, "next", 1, name="newer")
        await asyncio.to_thread(Registry(NAMESPACE).join, session, registration, "ready")
        await here.sql(
            """
            INSERT INTO standby (instance_id, action_ids)
            SELECT i.id, ARRAY[a.id] FROM instances AS i, actions AS a WHERE i.name = 'newer' AND a.name = 'brand-new'
            """
        )
        yield


# -- reading ----------------------------------------------------------------------------------------------------------


async def test_the_list_has_every_action_with_the_documented_fields_sorted_by_name(here: LocalInstance) -> None:
    items = (await get(here, "/actions"))["items"]
    assert [each["name"] for each in items] == sorted(each.name for each in here.engine.catalogue)
    assert all(set(each) == ACTION for each in items)
    assert await get(here, "/actions/noop") in items


async def test_an_action_shows_its_schedule_and_its_next_run(here: LocalInstance) -> None:
    shown = await get(here, "/actions/seldom")
    assert shown["summary"] == "Run when the test makes it due."
    assert (shown["schedule"], shown["misfire"], shown["state"]) == ("every 10h jitter 1s", "skip", "active")
    left = datetime.fromisoformat(shown["next_run_at"]) - datetime.now(UTC)
    assert timedelta(hours=9, minutes=58) < left <= timedelta(hours=10)


async def test_an_action_without_a_schedule_has_neither_schedule_nor_next_run(here: LocalInstance) -> None:
    shown = await get(here, "/actions/count")
    assert (shown["schedule"], shown["next_run_at"], shown["summary"], shown["last_run"]) == (None, None, None, None)


async def test_an_action_shows_its_declared_options(here: LocalInstance) -> None:
    shown = await get(here, "/actions/urgent")
    options = ("overlap", "misfire", "priority", "max_attempts", "concurrency", "rate", "burst", "retention")
    assert [shown[option] for option in options] == ["allow", "once", 7, 2, 3, "100/h", 5, "36h"]
    for name, rate, burst in (("rated", "20/s", 1), ("count", None, None)):
        shown = await get(here, f"/actions/{name}")
        assert (shown["rate"], shown["burst"]) == (rate, burst)
    in_turn = await get(here, "/actions/in-turn")
    assert (in_turn["overlap"], in_turn["concurrency"]) == ("queue", 1)


async def test_a_ready_instance_is_on_standby_before_the_reconciler_has_read(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: Reconciler) -> None: ...

    monkeypatch.setattr(Reconciler, "_start", never)
    async with local_instance(address, actions=MODULES) as here:
        me = (await get(here, "/health/instances"))["self"]
        assert (await get(here, "/actions/noop"))["standby"] == [me]


async def test_an_action_shows_the_instances_on_which_it_is_running(here: LocalInstance) -> None:
    me = (await get(here, "/health/instances"))["self"]
    run_id = await here.trigger("nap", {"seconds": 60})
    await here.until(run_id, "running")
    shown = await get(here, "/actions/nap")
    assert shown["running_on"] == [me]
    assert shown["last_run"] == await get(here, f"/runs/{run_id}") | {"truncated": {}}
    await post(here, f"/runs/{run_id}/cancel", status=200)
    await here.ended(run_id)
    assert (await get(here, "/actions/nap"))["running_on"] == []


async def test_the_last_run_of_an_action_is_its_newest_run_in_any_state(here: LocalInstance) -> None:
    first = await here.run("noop")
    assert (await get(here, "/actions/noop"))["last_run"]["id"] == first.id
    second = await here.run("noop")
    await here.run("echo")
    assert (await get(here, "/actions/noop"))["last_run"]["id"] == second.id
    await post(here, "/actions/noop/pause", status=200)
    waiting = [await here.trigger("noop", priority=priority) for priority in (5, -5, 0)]
    assert (await get(here, "/actions/noop"))["last_run"]["id"] == waiting[-1]
    assert (await get(here, "/actions/echo"))["last_run"]["state"] == "succeeded"


async def test_an_action_that_no_living_instance_declares_is_vanished(here: LocalInstance) -> None:
    await insert_action_of_another_release(here)
    shown = await get(here, "/actions/brand-new")
    assert (shown["state"], shown["standby"], shown["next_run_at"]) == ("vanished", [], None)
    assert shown["schedule"] == "every 1h"
    assert shown in (await get(here, "/actions"))["items"]
    refused = await post(here, "/actions/brand-new/runs", {})
    assert "neither does any other living instance" in str(is_problem(refused, "unavailable")["detail"])
    assert refused.headers["retry-after"] == "30"


@pytest.mark.usefixtures("newer")
async def test_a_gone_instance_is_not_on_standby_for_its_actions(here: LocalInstance) -> None:
    await here.sql("UPDATE instances SET state = 'gone', gone_at = now() WHERE name = 'newer'")
    assert (await get(here, "/actions/brand-new"))["state"] == "vanished"


@pytest.mark.usefixtures("newer")
async def test_an_action_of_a_newer_release_can_be_read_and_paused_through_an_older_one(
    here: LocalInstance,
) -> None:
    shown = await get(here, "/actions/brand-new")
    assert (shown["state"], shown["standby"], shown["summary"]) == ("active", ["newer"], None)
    assert (await post(here, "/actions/brand-new/pause", status=200)).json()["state"] == "paused"
    assert (await post(here, "/actions/brand-new/resume", status=200)).json()["state"] == "active"


@pytest.mark.usefixtures("newer")
async def test_a_trigger_of_an_action_of_a_newer_release_is_refused_with_503(
    here: LocalInstance,
) -> None:
    for path, body in (
        ("/actions/brand-new/runs", {}),
        ("/runs:batch", {"runs": [{"action": "noop"}, {"action": "brand-new"}]}),
    ):
        refused = await post(here, path, body)
        problem = is_problem(refused, "unavailable")
        assert "newer" in str(problem["detail"])
        assert refused.headers["retry-after"] == "2"
    assert await count_runs(here) == 0


@pytest.mark.parametrize("name", ["none-such", "%00", "Caf%C3%A9", "a%2Fb", "x" * 101])
async def test_all_requests_for_an_unknown_action_are_answered_with_404(here: LocalInstance, name: str) -> None:
    is_problem(await here.running.client.get(f"/actions/{name}"), "not-found")
    for what in ("runs", "pause", "resume"):
        is_problem(await post(here, f"/actions/{name}/{what}"), "not-found")


async def test_listing_the_actions_reads_only_the_last_run_of_each(here: LocalInstance) -> None:
    await here.sql(
        """
        INSERT INTO actions (name, misfire, overlap, priority, max_attempts, retention)
        SELECT 'many-' || i, 'once', 'allow', 0, 1, '7d' FROM generate_series(1, 1000) AS i
        """
    )
    await here.sql(
        """
        INSERT INTO finished_runs (id, action_id, state, priority, run_at, token, attempt, max_attempts, trigger,
                                   events, created_at, finished_at, expires_at)
        SELECT i, a.id, 'succeeded', 0, now(), 1, 1, 1, 'api', 0, now(), now(), now() + interval '1 day'
        FROM generate_series(1, 30000) AS i, actions AS a
        WHERE a.name = 'noop'
        """
    )
    # So the statistics have only one action, and the planner assumes that the others are like it.
    await here.sql("ANALYZE finished_runs")
    database = here.running.context.database
    async with database.connection() as connection:
        found = await admin.find_all(connection, database.namespace, here.engine.catalogue)
        read = await connection.execute(
            "SELECT seq_tup_read, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'finished_runs'"
        )
        sequentially, by_index = await read.fetchone() or (0, 0)
    assert len(found) > 1000
    assert [each.last_run.id for each in found if each.last_run] == [30000]
    assert sequentially == 0
    # One index probe for each action and state (most find no row), and one for the run itself.
    assert by_index <= 4 * len(found)


# -- triggering -------------------------------------------------------------------------------------------------------


async def test_a_trigger_without_a_body_is_answered_with_the_run_and_its_location(here: LocalInstance) -> None:
    answer = await here.running.client.post("/actions/noop/runs")
    assert answer.status_code == 202
    run = answer.json()
    assert set(run) == RUN
    assert (run["action"], run["state"], run["trigger"], run["payload"]) == ("noop", "pending", "api", {})
    assert answer.headers["location"] == f"/runs/{run['id']}"
    ended = await here.ended(run["id"])
    assert ended.state == "succeeded"


async def test_the_run_in_the_response_equals_the_stored_run(here: LocalInstance) -> None:
    await post(here, "/actions/echo/pause", status=200)
    order = {"payload": {"a": [1, None, "ü"]}, "priority": 3, "run_at": "2030-01-01T12:00:00+01:00", "key": "once"}
    run = (await post(here, "/actions/echo/runs", order, 202)).json()
    assert run == await get(here, f"/runs/{run['id']}")
    assert datetime.fromisoformat(run["run_at"]) == datetime(2030, 1, 1, 11, tzinfo=UTC)
    assert await here.sql("SELECT priority FROM runs") == [(3,)]


async def test_every_field_may_be_null(here: LocalInstance) -> None:
    order = {"payload": None, "key": None, "run_at": None, "priority": None}
    await post(here, "/actions/noop/runs", order, 202)


async def test_a_trigger_without_a_priority_uses_the_priority_of_the_action(here: LocalInstance) -> None:
    await post(here, "/actions/urgent/pause", status=200)
    await post(here, "/actions/urgent/runs", {}, 202)
    await post(here, "/actions/urgent/runs", {"priority": 0}, 202)
    assert await here.sql("SELECT priority FROM runs ORDER BY id") == [(7,), (0,)]


async def test_a_run_is_pending_until_its_run_at(here: LocalInstance) -> None:
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    waiting = (await post(here, "/actions/noop/runs", {"run_at": later}, 202)).json()
    await here.run("noop")
    assert (await here.read(waiting["id"])).state == "pending"


@pytest.mark.parametrize(
    ("name", "payload"), [("count", 3), ("count", 0), ("names", ["a"]), ("names", []), ("echo", {}), ("weigh", None)]
)
async def test_a_payload_may_be_any_json_value_that_the_type_of_the_action_accepts(
    here: LocalInstance, name: str, payload: Any
) -> None:
    if payload is None:
        is_problem(await post(here, f"/actions/{name}/runs", {"payload": None}), "invalid")
        return
    run = (await post(here, f"/actions/{name}/runs", {"payload": payload}, 202)).json()
    assert run["payload"] == payload
    assert (await here.ended(run["id"])).result == payload


async def test_an_invalid_payload_is_refused_with_the_name_of_the_field(here: LocalInstance) -> None:
    refused = await post(here, "/actions/weigh/runs", {"payload": {"weight": "s3cret"}})
    problem = is_problem(refused, "invalid")
    assert [each["field"] for each in problem["errors"]] == ["payload.weight"]  # type: ignore[attr-defined]
    assert "payload.weight" in str(problem["detail"])
    assert "s3cret" not in refused.text
    assert await count_runs(here) == 0


async def test_an_action_with_object_payloads_refuses_all_other_json_values(here: LocalInstance) -> None:
    for payload in ([], 0, "", False, "text", 1.5, [1]):
        problem = is_problem(await post(here, "/actions/echo/runs", {"payload": payload}), "invalid")
        assert problem["errors"] == [{"field": "payload", "message": "Input should be a valid dictionary"}], payload


async def test_an_invalid_field_is_named_and_no_run_is_inserted(here: LocalInstance) -> None:
    for field, value in INVALID:
        problem = is_problem(await post(here, "/actions/noop/runs", {field: value}), "invalid")
        assert [each["field"] for each in problem["errors"]] == [field], value  # type: ignore[attr-defined]
    assert await count_runs(here) == 0


async def test_a_number_that_json_does_not_allow_is_refused_and_not_replaced_by_null(here: LocalInstance) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        problem = is_problem(await send(here, f'{{"payload": {{"x": [{number}]}}}}'.encode()), "invalid")
        assert [each["field"] for each in problem["errors"]] == ["payload"], number  # type: ignore[attr-defined]


async def test_a_body_that_is_not_a_json_object_is_refused(here: LocalInstance) -> None:
    for content in (b"{", b"[]", b"null", b"\xff", b'{"payload": "\\ud800"}', b"[" * 5000):
        is_problem(await send(here, content), "invalid")
    assert await count_runs(here) == 0


async def test_a_body_with_another_content_type_is_refused(here: LocalInstance) -> None:
    is_problem(await send(here, b"{}", "application/x-www-form-urlencoded"), "unsupported-media-type")
    is_problem(await here.running.client.post("/actions/echo/runs", content=b"{}"), "unsupported-media-type")
    assert await count_runs(here) == 0


async def test_an_action_with_overlap_skip_is_refused_while_it_has_an_active_run(
    here: LocalInstance,
) -> None:
    run = (await post(here, "/actions/alone/runs", {"payload": {"seconds": 60}}, 202)).json()
    problem = is_problem(await post(here, "/actions/alone/runs"), "conflict")
    assert problem["run"] == run["id"]
    assert str(run["id"]) in str(problem["detail"])
    await post(here, f"/runs/{run['id']}/cancel", status=200)
    await here.ended(run["id"])
    await post(here, "/actions/alone/runs", {"payload": {"seconds": 0}}, 202)


async def test_a_trigger_in_a_route_of_the_service_returns_the_same_problems(here: LocalInstance) -> None:
    async def own(session: InSession, name: str, weight: str, key: str = "k") -> int:
        return await trigger(name, {"weight": weight}, key=key, session=session)

    here.running.app.post("/own")(own)
    assert (await post(here, "/own?name=weigh&weight=3")).status_code == 200
    problem = is_problem(await post(here, "/own?name=weigh&weight=x"), "invalid")
    assert [each["field"] for each in problem["errors"]] == ["payload.weight"]  # type: ignore[attr-defined]
    is_problem(await post(here, "/own?name=none-such&weight=3"), "not-found")
    problem = is_problem(await post(here, "/own?name=weigh&weight=3&key=%0A"), "invalid")
    assert problem["errors"] == []
    (run_id,) = [(await post(here, "/own?name=alone&weight=3&key=a")).json()]
    problem = is_problem(await post(here, "/own?name=alone&weight=3&key=b"), "conflict")
    assert problem["run"] == run_id


def test_a_status_that_a_route_raises_has_the_general_kind_of_problem() -> None:
    assert (BY_STATUS[409].slug, BY_STATUS[422].slug) == ("conflict", "invalid")


# -- pausing and resuming ---------------------------------------------------------------------------------------------


async def test_while_an_action_is_paused_triggers_are_accepted_and_wait(here: LocalInstance) -> None:
    paused = (await post(here, "/actions/noop/pause", status=200)).json()
    assert set(paused) == ACTION
    assert paused["state"] == "paused"
    run = (await post(here, "/actions/noop/runs", status=202)).json()
    await here.run("echo")
    reads = here.engine.reconciler.reads
    here.engine.reconciler.read_now()
    await soon(lambda: reconciler_has_read(here, reads + 2))
    assert (await here.read(run["id"])).state == "pending"
    assert (await post(here, "/actions/noop/resume", status=200)).json()["state"] == "active"
    assert (await here.ended(run["id"])).state == "succeeded"


async def reconciler_has_read(here: LocalInstance, times: int) -> bool:
    return here.engine.reconciler.reads >= times


async def test_pausing_again_changes_nothing(here: LocalInstance) -> None:
    await post(here, "/actions/noop/pause", status=200)
    since = await here.sql("SELECT paused_at FROM actions WHERE name = 'noop'")
    await post(here, "/actions/noop/pause", status=200)
    assert await here.sql("SELECT paused_at FROM actions WHERE name = 'noop'") == since


async def test_a_paused_action_has_no_next_run(here: LocalInstance) -> None:
    due = (await get(here, "/actions/seldom"))["next_run_at"]
    assert (await post(here, "/actions/seldom/pause", status=200)).json()["next_run_at"] is None
    assert (await post(here, "/actions/seldom/resume", status=200)).json()["next_run_at"] == due


async def test_slots_during_a_pause_are_skipped_and_the_next_slot_keeps_its_time(
    here: LocalInstance,
) -> None:
    await post(here, "/actions/seldom/pause", status=200)
    ((slot,),) = await here.sql(
        "UPDATE actions SET next_run_at = now() - interval '3 hours' WHERE name = 'seldom' RETURNING next_run_at"
    )
    here.engine.scheduler.schedule_now()
    await here.run("noop")
    resumed = (await post(here, "/actions/seldom/resume", status=200)).json()
    assert datetime.fromisoformat(resumed["next_run_at"]) == slot + timedelta(hours=10)
    await here.run("noop")
    assert resumed["last_run"] is None
    assert (await get(here, "/actions/seldom"))["last_run"] is None


async def test_resuming_an_action_that_is_not_paused_keeps_its_due_slot(here: LocalInstance) -> None:
    database = here.running.context.database
    async with database.connection() as connection:
        due = "UPDATE flotilla.actions SET next_run_at = now() WHERE name = 'seldom' RETURNING next_run_at"
        slot = await (await connection.execute(due)).fetchone()
        await admin.resume(connection, database.namespace, "seldom")
        read = "SELECT next_run_at FROM flotilla.actions WHERE name = 'seldom'"
        assert await (await connection.execute(read)).fetchone() == slot
        await connection.rollback()


async def test_resuming_notifies_of_the_schedule_and_of_each_queue_with_pending_runs(
    here: LocalInstance, address: str
) -> None:
    await post(here, "/actions/noop/pause", status=200)
    later = datetime(2030, 1, 1, tzinfo=UTC)
    for priority, run_at in ((5, later), (5, later - timedelta(days=1)), (0, later)):
        await here.trigger("noop", priority=priority, run_at=run_at)
    with psycopg.connect(address, autocommit=True) as listener:
        listener.execute("LISTEN flotilla")
        await post(here, "/actions/noop/resume", status=200)
        # Notifications arrive in the order of the commits, so all of the resumption arrive before this one.
        await here.sql("SELECT pg_notify('flotilla', 'end:')")
        received = await asyncio.to_thread(lambda: list(read_until(listener, "end:")))
    number = here.engine.catalogue.id_of("noop")
    seconds = int(later.timestamp())
    assert "slots:" in received
    (queues,) = [payload for payload in received if payload.startswith("runs:")]
    expected = {f"{number}:5:{(seconds - 86400) * 10**6}", f"{number}:0:{seconds * 10**6}"}
    assert set(queues.removeprefix("runs:").split(",")) == expected


def read_until(listener: psycopg.Connection[Any], last: str) -> Iterator[str]:
    for each in listener.notifies(timeout=BOUND):
        yield each.payload
        if each.payload == last:
            return
    raise AssertionError(f"no notification {last} within {BOUND} s")


async def test_a_pause_waits_for_a_scheduler_that_is_inserting_a_run_of_the_action(
    here: LocalInstance, address: str
) -> None:
    """Otherwise the run could appear after the response to the pause."""
    with psycopg.connect(address) as scheduling:
        values = {"actions": [here.engine.catalogue.id_of("seldom")]}
        scheduling.execute("UPDATE flotilla.actions SET next_run_at = now() WHERE name = 'seldom'")
        scheduling.execute(here.running.context.database.namespace.sql(READ_UNLOCKED), values)
        pausing = asyncio.create_task(post(here, "/actions/seldom/pause", status=200))
        await soon(lambda: here.sql("SELECT true FROM pg_locks WHERE NOT granted"))
        assert not pausing.done()
        scheduling.commit()
    assert (await pausing).json()["state"] == "paused"


# -- scopes -----------------------------------------------------------------------------------------------------------


async def test_reading_needs_the_scope_read_and_changing_needs_operate(address: str) -> None:
    keys = {scope: make_key(scope, scope) for scope in ("read", "operate")}
    lines = ",".join(line for _, line in keys.values())
    async with local_instance(address, actions=MODULES, api_keys=lines) as here:
        reader, operator = ({"x-api-key": key} for key, _ in keys.values())
        for path in ("/actions", "/actions/noop", "/runs", "/runs/1"):
            is_problem(await here.running.client.get(path), "unauthorized")
            assert (await here.running.client.get(path, headers=reader)).status_code in {200, 404}
        for path in ("/actions/noop/runs", "/actions/noop/pause", "/actions/noop/resume", "/runs:batch"):
            is_problem(await post(here, path), "unauthorized")
            is_problem(await post(here, path, headers=reader), "forbidden")
        for path in ("/runs/1/cancel", "/runs/1/retry"):
            is_problem(await post(here, path, headers=reader), "forbidden")
        await post(here, "/actions/noop/runs", headers=operator, status=202)
