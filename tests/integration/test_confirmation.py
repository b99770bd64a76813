"""A connection that breaks at the commit: the response has the result, or says that the outcome is unknown."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest

from app.fleet.engine.enqueue import confirm
from app.fleet.engine.enqueue.orders import Order
from app.fleet.errors import OutcomeUnknown
from tests.integration.test_actions_http import count_runs, get, post
from tests.integration.test_edge import is_problem
from tests.support.postgres import Postgres
from tests.support.proxy import Proxy
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio

# In the payload, and so in the message that is sent to PostgreSQL.
MARKED = {"text": "the-one-that-breaks"}
SENT = MARKED["text"].encode()


@pytest.fixture
def proxy(postgres: Postgres) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", postgres.port)) as own:
        yield own


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits until the pool has recovered, also on a busy machine."""
    monkeypatch.setattr(confirm, "CONFIRM_TIMEOUT", 60.0)


@pytest.fixture
async def here(address: str, proxy: Proxy) -> AsyncIterator[LocalInstance]:
    through = f"postgresql://postgres@127.0.0.1:{proxy.port}/{address.rpartition('/')[2]}"
    async with local_instance(through) as own:
        for name in ("echo", "alone", "noop"):
            await post(own, f"/actions/{name}/pause", status=200)
        yield own
        proxy.heal()


async def wait_until_healthy(here: LocalInstance) -> None:
    async def healthy() -> bool:
        return here.running.context.database.healthy

    await soon(healthy)


@pytest.mark.parametrize("breaks", ["after the commit", "before the statement arrives"])
@pytest.mark.parametrize(
    ("name", "last"), [("echo", ()), ("alone", (b"COMMIT",))], ids=["one statement", "a transaction"]
)
async def test_a_request_whose_commit_is_unconfirmed_makes_and_returns_one_run(
    here: LocalInstance, proxy: Proxy, breaks: str, name: str, last: tuple[bytes, ...]
) -> None:
    payload = MARKED if name == "echo" else {"seconds": 0, "text": MARKED["text"]}
    trap = proxy.withhold_answer if breaks == "after the commit" else proxy.lose
    trap(SENT, *last)
    run = (await post(here, f"/actions/{name}/runs", {"payload": payload}, 202)).json()
    assert proxy.sprung.is_set()
    assert await count_runs(here) == 1
    assert await get(here, f"/runs/{run['id']}") == run


@pytest.mark.parametrize("breaks", ["after the commit", "before the commit arrives"])
async def test_a_batch_whose_commit_is_unconfirmed_returns_its_runs_in_order(
    here: LocalInstance, proxy: Proxy, breaks: str
) -> None:
    orders: list[dict[str, Any]] = [{"action": "echo", "payload": {"n": n}} for n in range(5)]
    orders += [{"action": "echo", "payload": MARKED, "key": "k"}, {"action": "noop"}]
    trap = proxy.withhold_answer if breaks == "after the commit" else proxy.lose
    trap(SENT, b"COMMIT")
    runs = (await post(here, "/runs:batch", {"runs": orders}, 202)).json()["runs"]
    assert proxy.sprung.is_set()
    assert [run["payload"] for run in runs] == [{"n": 0}, {"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}, MARKED, {}]
    assert len({run["id"] for run in runs}) == 7 == await count_runs(here)


@pytest.mark.parametrize("given", [{"headers": {"idempotency-key": "k"}}, {"key": "k"}])
@pytest.mark.parametrize("path", ["/actions/echo/runs", "/runs:batch"])
async def test_the_service_itself_repeats_an_unconfirmed_request_with_a_key(
    here: LocalInstance, proxy: Proxy, given: dict[str, Any], path: str
) -> None:
    order = {"payload": MARKED, **({"key": "k"} if "key" in given else {})}
    body = order if path.startswith("/actions") else {"runs": [{"action": "echo", **order}]}
    proxy.withhold_answer(SENT, b"COMMIT")
    answer = await post(here, path, body, headers=given.get("headers"))
    assert proxy.sprung.is_set()
    assert answer.status_code == 200, answer.text
    assert await count_runs(here) == 1


async def test_an_insert_that_arrives_after_its_repetition_is_rolled_back(here: LocalInstance) -> None:
    triggers = here.engine.triggers
    await triggers.trigger([Order("echo"), Order("noop")], by="api", mark="request:x")
    with pytest.raises(psycopg.errors.UniqueViolation):
        await triggers.trigger([Order("echo"), Order("noop")], by="api", mark="request:x")
    assert await count_runs(here) == 2


async def test_the_mark_of_a_request_is_deleted_with_its_run(here: LocalInstance) -> None:
    await post(here, "/actions/noop/resume", status=200)
    run = (await post(here, "/actions/noop/runs", status=202)).json()
    await here.ended(run["id"])
    assert await here.sql("SELECT run_id FROM run_keys") == [(run["id"],)]
    await here.sql("UPDATE finished_runs SET expires_at = now() - interval '1 second'")
    await here.engine.pruner.prune()
    assert await here.sql("SELECT run_id FROM run_keys") == []


async def test_during_an_outage_an_unconfirmed_request_is_answered_with_outcome_unknown(
    here: LocalInstance, proxy: Proxy, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirm, "CONFIRM_TIMEOUT", 0.5)
    proxy.withhold_answer(SENT, then_refuse=True)
    refused = await post(here, "/actions/echo/runs", {"payload": MARKED})
    is_problem(refused, "outcome-unknown")
    assert "retry-after" not in refused.headers
    with psycopg.connect(address) as direct:
        assert direct.execute("SELECT count(*) FROM flotilla.runs").fetchone() == (1,)
    # A request that was not sent to PostgreSQL is only unavailable.
    is_problem(await post(here, "/actions/echo/runs", {"payload": {}}), "unavailable")
    is_problem(await here.running.client.get("/runs"), "unavailable")
    proxy.heal()
    await wait_until_healthy(here)


async def test_an_unconfirmed_change_is_answered_with_outcome_unknown_and_not_as_failed(
    here: LocalInstance, proxy: Proxy
) -> None:
    proxy.withhold_answer(b"SET paused_at = clock_timestamp()")
    refused = await post(here, "/actions/weigh/pause")
    assert proxy.sprung.is_set()
    is_problem(refused, "outcome-unknown")
    await wait_until_healthy(here)
    assert (await get(here, "/actions/weigh"))["state"] == "paused"


async def test_a_read_whose_connection_breaks_is_answered_with_unavailable(here: LocalInstance, proxy: Proxy) -> None:
    proxy.withhold_answer(b"finished_runs")
    refused = await here.running.client.get("/runs/4711")
    assert proxy.sprung.is_set()
    is_problem(refused, "unavailable")


def test_an_unconfirmed_command_reports_that_its_outcome_is_unknown(address: str, proxy: Proxy) -> None:
    through = f"postgresql://postgres@127.0.0.1:{proxy.port}/{address.rpartition('/')[2]}"
    environment = {**os.environ, "DATABASE_URL": through, "FLOTILLA_ACTIONS": "tests.support.trial_actions"}
    with psycopg.connect(address, autocommit=True) as direct:
        direct.execute(
            "INSERT INTO flotilla.actions (name, misfire, overlap, priority, max_attempts, retention) "
            "VALUES ('echo', 'once', 'allow', 0, 1, '7d')"
        )
        proxy.withhold_answer(SENT, b"COMMIT")
        command = [sys.executable, "-m", "app", "trigger", "echo", "--payload", json.dumps(MARKED)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == OutcomeUnknown.exit_code == 4
        assert "check whether the change was made" in done.stderr
        assert direct.execute("SELECT count(*) FROM flotilla.runs").fetchone() == (1,)
