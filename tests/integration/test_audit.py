"""The audit log: each change is logged with the name of the API key, or with the user of the command line."""

import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.fleet.api_keys import make_key
from app.fleet.edge.callers.refused_keys import MAX_UNKNOWN_KEYS
from tests.integration.test_edge import is_problem
from tests.support.fleet import run
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio

READ, OPERATE, ADMIN = make_key("bob", "read"), make_key("alice", "operate"), make_key("root", "admin")
LINES = ",".join(line for _, line in (READ, OPERATE, ADMIN))


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address, api_keys=LINES, log_level="info") as own:
        yield own


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.message == event]  # type: ignore[attr-defined]


async def ask(here: LocalInstance, key: str | None, method: str, path: str, body: Any = None) -> Any:
    headers = {} if key is None else {"x-api-key": key}
    return await here.running.client.request(method, path, json=body, headers=headers)


async def audited(
    here: LocalInstance, caplog: pytest.LogCaptureFixture, key: str | None, method: str, path: str, body: Any = None
) -> dict[str, Any]:
    caplog.clear()
    await ask(here, key, method, path, body)
    (event,) = logged(caplog, "request.audited")
    return event


async def test_every_request_that_changes_something_is_logged_with_the_name_of_its_key(
    here: LocalInstance, caplog: pytest.LogCaptureFixture
) -> None:
    key = OPERATE[0]
    assert await audited(here, caplog, key, "POST", "/actions/noop/pause") == {
        "caller": "alice",
        "method": "POST",
        "route": "/actions/{name}/pause",
        "subject": "noop",
        "status": 200,
    }
    made = await audited(here, caplog, key, "POST", "/actions/noop/runs", {"payload": {"secret": "s3cret"}})
    found = re.fullmatch(r"noop run (\d+)", made["subject"])
    assert (made["route"], made["status"]) == ("/actions/{name}/runs", 202)
    assert found is not None
    assert "s3cret" not in caplog.text
    cancelled = await audited(here, caplog, key, "POST", f"/runs/{found[1]}/cancel")
    assert (cancelled["route"], cancelled["subject"]) == ("/runs/{id}/cancel", found[1])
    retried = await audited(here, caplog, key, "POST", f"/runs/{found[1]}/retry")
    assert retried["route"] == "/runs/{id}/retry"
    batch = await audited(here, caplog, key, "POST", "/runs:batch", {"runs": [{"action": "echo"}] * 3})
    assert re.fullmatch(r"3 runs from \d+", batch["subject"])
    count = await audited(here, caplog, key, "POST", "/runs:retry", {"action": "noop"})
    assert (count["route"], count["subject"]) == ("/runs:retry", "noop 0 runs")
    assert (await audited(here, caplog, key, "POST", "/actions/noop/resume"))["route"] == "/actions/{name}/resume"
    own = await audited(here, caplog, key, "POST", "/trial/parcels", {"weight": 3})
    assert (own["caller"], own["route"], own["status"]) == ("alice", "/trial/parcels", 200)


async def test_a_request_that_is_refused_is_logged_too(here: LocalInstance, caplog: pytest.LogCaptureFixture) -> None:
    for key, name, status in ((None, None, 401), ("flotilla_wrong", None, 401), (READ[0], "bob", 403)):
        event = await audited(here, caplog, key, "POST", "/actions/noop/pause")
        assert (event["caller"], event["status"], event["subject"]) == (name, status, "noop")
    nowhere = await audited(here, caplog, OPERATE[0], "POST", "/nowhere")
    assert (nowhere["route"], nowhere["status"]) == (None, 404)


async def test_reading_is_not_logged(here: LocalInstance, caplog: pytest.LogCaptureFixture) -> None:
    await ask(here, READ[0], "GET", "/runs")
    assert logged(caplog, "request.audited") == []


async def test_only_an_admin_releases_a_lock(here: LocalInstance, caplog: pytest.LogCaptureFixture) -> None:
    refused = await ask(here, OPERATE[0], "DELETE", "/locks/none?reason=why")
    assert "'admin'" in str(is_problem(refused, "forbidden")["detail"])
    is_problem(await ask(here, ADMIN[0], "DELETE", "/locks/none?reason=why"), "not-found")
    assert (await audited(here, caplog, ADMIN[0], "DELETE", "/locks/none?reason=why"))["caller"] == "root"


async def test_an_address_that_sends_unknown_keys_is_limited_and_a_valid_key_is_not(here: LocalInstance) -> None:
    for _ in range(MAX_UNKNOWN_KEYS):
        is_problem(await ask(here, "flotilla_wrong", "GET", "/actions"), "unauthorized")
    refused = await ask(here, "flotilla_wrong", "GET", "/actions")
    is_problem(refused, "too-many-requests")
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert (await ask(here, READ[0], "GET", "/actions")).status_code == 200
    is_problem(await ask(here, None, "GET", "/actions"), "unauthorized")
    is_problem(await ask(here, READ[0], "POST", "/actions/noop/pause"), "forbidden")
    metrics = (await ask(here, READ[0], "GET", "/metrics")).text
    for reason, count in (("unknown", MAX_UNKNOWN_KEYS + 1), ("missing", 1), ("scope", 1)):
        assert f'flotilla_keys_refused_total{{reason="{reason}"}} {count:.1f}' in metrics


async def test_the_leader_logs_changes_made_with_the_command_line(
    here: LocalInstance, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def leads() -> bool:
        return here.running.context.member.leading

    await soon(leads)
    caplog.set_level(logging.INFO)
    run_id = await here.trigger("give-up")
    await here.ended(run_id)
    commands = (
        ("actions pause", ("noop",), "noop"),
        ("actions resume", ("noop",), "noop"),
        ("trigger", ("noop",), r"noop run \d+"),
        ("runs retry", (str(run_id),), f"run {run_id}"),
        ("runs retry-all", ("--action", "noop"), "noop 0 runs"),
    )
    for number, (command, arguments, subject) in enumerate(commands, 1):
        flotilla(address, *command.split(), *arguments)
        await soon(lambda number=number: has_records(caplog, number))  # type: ignore[misc]
        event = logged(caplog, "command.audited")[-1]
        assert event["command"] == command
        assert re.fullmatch(subject, event["subject"])
        assert " on " in event["by"]


async def has_records(caplog: pytest.LogCaptureFixture, count: int) -> bool:
    return len(logged(caplog, "command.audited")) >= count


def flotilla(address: str, *arguments: str) -> None:
    done = run(*arguments, address=address, env={"FLOTILLA_ACTIONS": "tests.support.trial_actions"})
    assert done.returncode == 0, done.stderr
