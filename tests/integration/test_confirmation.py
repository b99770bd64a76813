"""A connection that breaks at the commit: the answer is what was done, or that it is not known."""

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
from tests.integration.test_actions_http import get, post, runs_there_are
from tests.integration.test_edge import is_problem
from tests.support.postgres import Postgres
from tests.support.proxy import Proxy
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio

# In the payload, and so in what is sent to PostgreSQL.
MARKED = {"text": "the-one-that-breaks"}
SENT = MARKED["text"].encode()


@pytest.fixture
def proxy(postgres: Postgres) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", postgres.port)) as own:
        yield own


@pytest.fixture
async def here(address: str, proxy: Proxy) -> AsyncIterator[LocalInstance]:
    through = f"postgresql://postgres@127.0.0.1:{proxy.port}/{address.rpartition('/')[2]}"
    async with local_instance(through) as own:
        for name in ("echo", "alone", "noop"):
            await post(own, f"/actions/{name}/pause", status=200)
        yield own
        proxy.heal()


async def recovered(here: LocalInstance) -> None:
    async def healthy() -> bool:
        return here.running.context.database.healthy

    await soon(healthy)


@pytest.mark.parametrize("breaks", ["after the commit", "before the statement arrives"])
@pytest.mark.parametrize(
    ("name", "last"), [("echo", ()), ("alone", (b"COMMIT",))], ids=["one statement", "a transaction"]
)
async def test_a_request_without_a_key_makes_one_run_and_is_answered_with_it(
    here: LocalInstance, proxy: Proxy, breaks: str, name: str, last: tuple[bytes, ...]
) -> None:
    payload = MARKED if name == "echo" else {"seconds": 0, "text": MARKED["text"]}
    trap = proxy.withhold_answer if breaks == "after the commit" else proxy.lose
    trap(SENT, *last)
    run = (await post(here, f"/actions/{name}/runs", {"payload": payload}, 202)).json()
    assert proxy.sprung.is_set()
    assert await runs_there_are(here) == 1
    assert await get(here, f"/runs/{run['id']}") == run


@pytest.mark.parametrize("breaks", ["after the commit", "before the commit arrives"])
async def test_a_batch_is_answered_with_its_runs_in_their_order(here: LocalInstance, proxy: Proxy, breaks: str) -> None:
    orders: list[dict[str, Any]] = [{"action": "echo", "payload": {"n": n}} for n in range(5)]
    orders += [{"action": "echo", "payload": MARKED, "key": "k"}, {"action": "noop"}]
    trap = proxy.withhold_answer if breaks == "after the commit" else proxy.lose
    trap(SENT, b"COMMIT")
    runs = (await post(here, "/runs:batch", {"runs": orders}, 202)).json()["runs"]
    assert proxy.sprung.is_set()
    assert [run["payload"] for run in runs] == [{"n": 0}, {"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}, MARKED, {}]
    assert len({run["id"] for run in runs}) == 7 == await runs_there_are(here)


@pytest.mark.parametrize("given", [{"headers": {"idempotency-key": "k"}}, {"key": "k"}])
@pytest.mark.parametrize("path", ["/actions/echo/runs", "/runs:batch"])
async def test_a_request_with_a_key_is_repeated_by_the_service_itself(
    here: LocalInstance, proxy: Proxy, given: dict[str, Any], path: str
) -> None:
    order = {"payload": MARKED, **({"key": "k"} if "key" in given else {})}
    body = order if path.startswith("/actions") else {"runs": [{"action": "echo", **order}]}
    proxy.withhold_answer(SENT, b"COMMIT")
    answer = await post(here, path, body, headers=given.get("headers"))
    assert proxy.sprung.is_set()
    assert answer.status_code == 200, answer.text
    assert await runs_there_are(here) == 1


async def test_a_commit_that_arrives_after_the_repetition_writes_nothing(here: LocalInstance) -> None:
    triggers = here.engine.triggers
    await triggers.trigger([Order("echo"), Order("noop")], by="api", mark="request:x")
    with pytest.raises(psycopg.errors.UniqueViolation):
        await triggers.trigger([Order("echo"), Order("noop")], by="api", mark="request:x")
    assert await runs_there_are(here) == 2


async def test_a_mark_is_forgotten_with_the_run(here: LocalInstance) -> None:
    await post(here, "/actions/noop/resume", status=200)
    run = (await post(here, "/actions/noop/runs", status=202)).json()
    await here.ended(run["id"])
    assert await here.sql("SELECT run_id FROM run_keys") == [(run["id"],)]
    await here.sql("UPDATE finished_runs SET expires_at = now() - interval '1 second'")
    await here.engine.pruner.prune()
    assert await here.sql("SELECT run_id FROM run_keys") == []


async def test_while_the_database_stays_away_the_answer_is_that_it_is_not_known(
    here: LocalInstance, proxy: Proxy, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirm, "CONFIRM_TIMEOUT", 0.5)
    proxy.withhold_answer(SENT, then_refuse=True)
    refused = await post(here, "/actions/echo/runs", {"payload": MARKED})
    is_problem(refused, "outcome-unknown")
    assert "retry-after" not in refused.headers
    with psycopg.connect(address) as direct:
        assert direct.execute("SELECT count(*) FROM flotilla.runs").fetchone() == (1,)
    # What was not sent has no unknown outcome.
    is_problem(await post(here, "/actions/echo/runs", {"payload": {}}), "unavailable")
    is_problem(await here.running.client.get("/runs"), "unavailable")
    proxy.heal()
    await recovered(here)


async def test_a_change_whose_commit_was_not_confirmed_is_not_said_to_have_failed(
    here: LocalInstance, proxy: Proxy
) -> None:
    proxy.withhold_answer(b"SET paused_at = clock_timestamp()")
    refused = await post(here, "/actions/weigh/pause")
    assert proxy.sprung.is_set()
    is_problem(refused, "outcome-unknown")
    await recovered(here)
    assert (await get(here, "/actions/weigh"))["state"] == "paused"


async def test_reading_may_be_repeated_whenever_the_connection_breaks(here: LocalInstance, proxy: Proxy) -> None:
    proxy.withhold_answer(b"finished_runs")
    refused = await here.running.client.get("/runs/4711")
    assert proxy.sprung.is_set()
    is_problem(refused, "unavailable")


def test_a_command_whose_commit_was_not_confirmed_says_that_its_outcome_is_not_known(
    address: str, proxy: Proxy
) -> None:
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
