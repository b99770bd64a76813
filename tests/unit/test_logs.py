"""Log lines are events with fields, in two shapes, and never with a password."""

import json
import logging
import sys

import pytest

from app.fleet.telemetry.logs import Formatter, events, redact, request_id, tells_something


def record(event: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("app.fleet.cluster.link", logging.WARNING, __file__, 1, event, (), None)
    made.fields = fields
    return made


def test_a_json_line_carries_identity_request_and_fields() -> None:
    formatter = Formatter(as_json=True)
    formatter.identity |= {"namespace": "red", "instance": "red-1"}
    token = request_id.set("r-1")
    line = json.loads(formatter.format(record("link.lost", silent_ms=2510)))
    request_id.reset(token)
    assert line["event"] == "link.lost"
    assert line["level"] == "warning"
    assert (line["namespace"], line["instance"], line["request_id"]) == ("red", "red-1", "r-1")
    assert line["silent_ms"] == 2510
    assert line["time"].endswith("+00:00")


def test_a_text_line_is_made_to_be_read() -> None:
    formatter = Formatter(as_json=False)
    formatter.identity |= {"namespace": "red", "instance": "red-1"}
    line = formatter.format(record("link.lost", reason="timeout"))
    assert line.split(" ", 1)[1] == "WARNING red/red-1 link.lost reason=timeout"


def test_a_json_line_stays_one_line_with_a_traceback() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        made = record("run.failed")
        made.exc_info = sys.exc_info()
    text = Formatter(as_json=True).format(made)
    assert "\n" not in text
    assert "ValueError: first" in json.loads(text)["error"]


@pytest.mark.parametrize("level", ["warning", "error"])
def test_an_error_that_is_logged_brings_its_traceback(level: str, caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise KeyError("deal")
    except KeyError as error:
        getattr(events("app.fleet.engine.executor"), level)("run.raised", run=17, error=error)
    (made,) = caplog.records
    line = json.loads(Formatter(as_json=True).format(made))
    assert line["run"] == 17
    assert line["error"].startswith("Traceback")
    assert line["error"].endswith("KeyError: 'deal'")


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/health/ready", 200, False),
        ("/health/live", 200, False),
        ("/health/ready", 503, True),
        ("/actions", 200, True),
    ],
)
def test_probes_that_found_all_well_are_left_out(path: str, status: int, told: bool) -> None:
    made = record("access")
    made.args = ("127.0.0.1:1", "GET", path, "1.1", status)
    assert tells_something(made) is told


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("postgresql://app:hunter2@db/app", "postgresql://app:***@db/app"),
        ("host=db password=hunter2 user=app", "host=db password=*** user=app"),
        ("host=db password='hunter 2' user=app", "host=db password=*** user=app"),
        ("postgresql://app@db/app", "postgresql://app@db/app"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_passwords_in_addresses_are_taken_out(text: str, safe: str) -> None:
    assert redact(text) == safe


def test_a_password_is_taken_out_whoever_wrote_the_line() -> None:
    made = logging.LogRecord("some.library", logging.ERROR, __file__, 1, "failed: %s", ("postgresql://a:s3@h/d",), None)
    for as_json in (True, False):
        assert "s3@" not in Formatter(as_json=as_json).format(made)
