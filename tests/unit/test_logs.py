"""Log lines are events with fields, as JSON or text: always valid, and without passwords."""

import json
import logging
import sys

import pytest

from app.fleet.telemetry.logs import Formatter, event_log, is_worth_a_line, request_id


def record(event: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("app.fleet.cluster.link", logging.WARNING, __file__, 1, event, (), None)
    made.fields = fields
    return made


def test_a_json_line_has_identity_request_and_fields() -> None:
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


def test_a_text_line_has_level_instance_event_and_fields() -> None:
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
def test_a_logged_error_has_its_traceback(level: str, caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise KeyError("deal")
    except KeyError as error:
        getattr(event_log("app.fleet.engine.execute.executor"), level)("run.failed", run=17, error=error)
    (made,) = caplog.records
    line = json.loads(Formatter(as_json=True).format(made))
    assert line["run"] == 17
    assert line["error"].startswith("Traceback")
    assert line["error"].endswith("KeyError: 'deal'")


@pytest.mark.parametrize(
    ("path", "status", "logged"),
    [
        ("/health/ready", 200, False),
        ("/health/live", 200, False),
        ("/health/ready", 503, True),
        ("/actions", 200, True),
    ],
)
def test_successful_probes_are_not_logged(path: str, status: int, logged: bool) -> None:
    made = record("access")
    made.args = ("127.0.0.1:1", "GET", path, "1.1", status)
    assert is_worth_a_line(made) is logged


def test_passwords_are_removed_from_the_lines_of_all_loggers() -> None:
    made = logging.LogRecord("some.library", logging.ERROR, __file__, 1, "failed: %s", ("postgresql://a:s3@h/d",), None)
    for as_json in (True, False):
        assert "s3@" not in Formatter(as_json=as_json).format(made)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


LINES = ["one\r\n12:00:00.000 ERROR   red/red-1 lock.forced lock=all", "\x1b[2J", "\x9b2J", "\u2028", "\u202e", "\x00"]


@pytest.mark.parametrize("text", LINES)
@pytest.mark.parametrize("as_json", [True, False])
def test_a_value_with_control_characters_cannot_forge_a_line(text: str, as_json: bool) -> None:
    made = record("lock.forced", reason=text)
    line = Formatter(as_json=as_json).format(made)
    assert line.isprintable()
    if as_json:
        assert json.loads(line)["reason"] == text


@pytest.mark.parametrize("text", LINES)
def test_the_text_of_an_exception_cannot_forge_a_line(text: str) -> None:
    try:
        raise ValueError(f"first\n{text}")
    except ValueError:
        made = record("run.failed")
        made.exc_info = sys.exc_info()
    first, *others = Formatter(as_json=False).format(made).split("\n")
    assert "run.failed" in first
    assert all(line.startswith("    ") and line.isprintable() for line in others)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        10**5000,
        "\ud800",
        b"\xff",
        Unspeakable(),
        {"deep": [[[[[[[[]]]]]]]]},
        {1: {2, 3}},
        "x" * 1_000_000,
    ],
    ids=["nan", "inf", "long number", "surrogate", "bytes", "unspeakable", "deep", "set", "long text"],
)
def test_a_json_line_is_valid_for_any_value_of_a_field(value: object) -> None:
    line = Formatter(as_json=True).format(record("run.failed", value=value))
    json.loads(line, parse_constant=pytest.fail)
    line.encode()
    assert len(line) < 10_000


@pytest.mark.parametrize("as_json", [True, False])
def test_an_exception_without_a_text_is_logged(as_json: bool) -> None:
    try:
        raise Unspeakable
    except Unspeakable:
        made = record("run.failed")
        made.exc_info = sys.exc_info()
    assert "Unspeakable" in Formatter(as_json=as_json).format(made)


def test_a_json_line_is_valid_if_a_password_at_its_end_is_removed() -> None:
    line = json.loads(Formatter(as_json=True).format(record("pool.suspected", reason="password=hunter2")))
    assert line["reason"] == "password=***"


def test_a_value_is_hidden_because_of_its_name() -> None:
    line = json.loads(Formatter(as_json=True).format(record("config", given={"password": "hunter2", "token": 41})))
    assert line["given"] == {"password": "***", "token": 41}


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    def deeper(n: int) -> None:
        if n:
            deeper(n - 1)
        else:
            raise ValueError("the end " + "x" * 50_000)

    try:
        deeper(1)
    except ValueError:
        made = record("run.failed")
        made.exc_info = sys.exc_info()
    trace = json.loads(Formatter(as_json=True).format(made))["error"]
    assert trace.startswith("Traceback")
    assert trace.endswith("xxx")
    assert len(trace) < 20_000
