"""The log of a real process: all loggers use one format, with the instance and the request of each line."""

import json

import httpx
import pytest

from tests.support.fleet import Fleet, Mode
from tests.support.postgres import eventually


@pytest.mark.empty_database
@pytest.mark.parametrize("mode", ["serve", "uvicorn"])
def test_in_production_every_line_is_json_with_namespace_instance_and_request(fleet: Fleet, mode: Mode) -> None:
    key = "ops:admin:" + "0" * 64
    production = {
        "FLOTILLA_ENVIRONMENT": "production",
        "FLOTILLA_API_KEYS": key,
        "FLOTILLA_LOG_FORMAT": "auto",
        "FLOTILLA_MIGRATE_ON_START": "true",
    }
    (instance,) = fleet.start(1, mode, **production)
    httpx.get(f"{instance.url}/nowhere", headers={"x-request-id": "find-me"})
    instance.terminate()
    instance.wait_exit()

    lines = [json.loads(line) for line in instance.text.splitlines()]
    assert all(
        {"time", "level", "event", "namespace", "instance", "request_id", "logger"} <= set(line) for line in lines
    )
    assert {line["namespace"] for line in lines} == {"flotilla"}
    ready = next(number for number, line in enumerate(lines) if line["event"] == "instance.ready")
    assert {line["instance"] for line in lines[ready:]} == {"flotilla-1"}
    loggers = {line["logger"] for line in lines}
    assert {"uvicorn.error", "uvicorn.access", "alembic.runtime.migration", "app.fleet.lifespan"} <= loggers
    (access,) = [line for line in lines if "/nowhere" in line["event"]]
    assert access["request_id"] == "find-me"


def test_in_development_log_lines_are_plain_text(fleet: Fleet) -> None:
    (instance,) = fleet.start(FLOTILLA_LOG_FORMAT="auto")
    # An instance logs that it is ready a moment after it has become ready.
    (line,) = eventually(lambda: [line for line in instance.text.splitlines() if "instance.ready" in line])
    assert "INFO    flotilla/flotilla-1 instance.ready role=all port=" in line


def test_a_failed_request_is_logged_with_its_id_and_traceback(fleet: Fleet) -> None:
    (instance,) = fleet.start()
    answer = httpx.get(f"{instance.url}/trial/fail")
    assert answer.status_code == 500
    identifier = answer.headers["x-request-id"]
    (line,) = eventually(
        lambda: [each for each in instance.lines("request.failed") if each["request_id"] == identifier]
    )
    assert "hunter2" in line["error"]
    assert len([each for each in instance.text.splitlines() if "hunter2" in each]) == 1, "it is logged once"
