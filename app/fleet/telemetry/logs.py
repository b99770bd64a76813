"""Logs: each line is an event with a name and fields, and always has the namespace, the instance and the request; in an
attempt also the run, and within a trace its id.

    log = event_log(__name__)
    log.info("link.lost", reason="timeout", silent_ms=2510)

In production a line is a JSON object; in development it is text. The lines of uvicorn, Alembic and all other libraries
go through the same handler and have the same fields.

Every value is redacted (`redaction.py`), then bounded in length, then formatted. So a line of JSON is always valid, and
a text inside a line cannot forge another line: in the text format, control characters are escaped, and every line of a
traceback is indented.

Not covered: lines of uvicorn's own supervisor (`--workers`, `--reload`), which never loads the service.
"""

import json
import logging
import math
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Protocol

from opentelemetry import trace

from app.fleet.telemetry.redaction import HIDDEN, printable, redact


class CurrentRun(Protocol):
    run_id: int
    # The id of the request that triggered it, directly or through other runs.
    request_id: str | None


# The request to which the present code belongs.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
# The run of which the present code is an attempt. One variable for all of it: each `set` costs every run 0.1 µs.
current_run: ContextVar[CurrentRun | None] = ContextVar("current_run", default=None)

# Characters of a field, and of a traceback, in a line. Of a longer traceback, both ends are kept.
MAX_FIELD = 4_000
MAX_TRACE = 16_000
MAX_DEPTH = 5
COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[41m"}
# Loggers that would otherwise write lines in their own format (`ADOPTED`), or too many lines (`QUIET`).
ADOPTED = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "alembic", "fastapi")
QUIET = ("psycopg.pool", "alembic.runtime.plugins", "watchfiles", "httpx", "httpcore")
PROBES = ("/health/live", "/health/ready")


def who() -> str | None:
    """Return on whose behalf the present code acts: `run/17`, or the id of a request."""
    run = current_run.get()
    return request_id.get() if run is None else f"run/{run.run_id}"


def first_request() -> str | None:
    """Return the id of the request to which the present code belongs; in an attempt, the one that triggered its run."""
    run = current_run.get()
    return request_id.get() if run is None else run.request_id


class EventLog:
    """A logger for events with fields."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, *, error: BaseException | None = None, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields, error)

    def error(self, event: str, *, error: BaseException | None = None, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields, error)

    def _write(self, level: int, event: str, fields: Mapping[str, Any], error: BaseException | None = None) -> None:
        self._logger.log(level, event, extra={"fields": fields}, exc_info=error)


def event_log(name: str) -> EventLog:
    return EventLog(logging.getLogger(name))


class Formatter(logging.Formatter):
    """Formats a line as JSON or as text. `identity` holds the fields that all lines of this process have."""

    def __init__(self, *, as_json: bool, colour: bool = False) -> None:
        super().__init__()
        self.identity: dict[str, str] = {}
        self._as_json = as_json
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        fields = {key: safe(value) for key, value in getattr(record, "fields", {}).items()}
        event = clean(message_of(record), MAX_FIELD)
        trace = None
        if record.exc_info:
            trace = clean(self._trace_of(record), MAX_TRACE, keep_end=True)
        return self._json(record, event, fields, trace) if self._as_json else self._text(record, event, fields, trace)

    def _trace_of(self, record: logging.LogRecord) -> str:
        assert record.exc_info is not None
        try:
            return self.formatException(record.exc_info)
        except BaseException:  # noqa: BLE001 — the exception's own methods are called, and may do anything
            kind = record.exc_info[0] if isinstance(record.exc_info, tuple) else type(record.exc_info)
            return f"{getattr(kind, '__name__', kind)} (its traceback cannot be written)"

    def _json(self, record: logging.LogRecord, event: str, fields: dict[str, Any], trace: str | None) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": event,
            **self.identity,
            "request_id": first_request(),
            **context(),
            "logger": record.name,
            **fields,
        }
        if trace:
            line["error"] = trace
        # `json.dumps` escapes only the first 32 control characters. The others can occur only inside strings.
        return printable_json(json.dumps(line, ensure_ascii=False))

    def _text(self, record: logging.LogRecord, event: str, fields: dict[str, Any], trace: str | None) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        who = "/".join(self.identity.values())
        words = [when, f"{record.levelname:<7}", who, printable(event)]
        words += [f"{key}={word(value)}" for key, value in fields.items()]
        around = {"request_id": first_request(), **context()}
        words += [f"{key}={word(value)}" for key, value in around.items() if value is not None and key not in fields]
        line = " ".join(words)
        if trace:
            # Indented, so that no line of an exception's text looks like a line of the log.
            line = "\n    ".join([line, *(printable(part) for part in trace.split("\n"))])
        colour = COLOURS.get(record.levelname) if self._colour else None
        return f"{colour}{line}\x1b[0m" if colour else line


def context() -> dict[str, Any]:
    """Return the run and the trace to which the present code belongs, if any."""
    run = current_run.get()
    span = trace.get_current_span().get_span_context()
    around: dict[str, Any] = {} if run is None else {"run": run.run_id}
    if span.is_valid:
        around["trace_id"] = trace.format_trace_id(span.trace_id)
    return around


def message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except BaseException:  # noqa: BLE001 — an argument's `__str__` may do anything, and the line must be written anyway
        return str(record.msg)


def safe(value: Any, depth: int = 0) -> Any:
    """Return the value as JSON can represent it: redacted, bounded, and without anything that `json.dumps` refuses."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int):
        # Python refuses to write integers of more than 4,300 digits.
        return int(value) if value.bit_length() <= 128 else f"(an integer of {value.bit_length()} bits)"
    if depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            # Tried as `name=value`, so that a value is also hidden because of its name.
            return {
                str(key): HIDDEN if redact(f"{key}=x") != f"{key}=x" else safe(each, depth + 1)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [safe(each, depth + 1) for each in value]
    try:
        text = str(value)
    except BaseException:  # noqa: BLE001 — whatever the object's own method raises
        text = f"({type(value).__name__} that cannot be written)"
    return clean(text, MAX_FIELD)


def clean(text: str, longest: int, *, keep_end: bool = False) -> str:
    """Redact a text. Cut a text that is too long, and say how much is missing."""
    length = len(text)
    text = redact(text)
    if len(text) <= longest:
        return text
    missing = f"… ({max(length, len(text)) - longest} more characters) …"
    if keep_end:
        return f"{text[: longest // 2]}\n{missing}\n{text[-(longest - longest // 2) :]}"
    return text[:longest] + missing


def word(value: Any) -> str:
    """Write a field's value in the text format: as it is, or in quotes if it would be ambiguous."""
    text = str(value)
    if not text or any(each in text for each in ' ="') or not text.isprintable():
        return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'
    return text


def printable_json(text: str) -> str:
    if text.isascii() or text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


class Handler(logging.StreamHandler[Any]):
    """Our handler. Its class identifies it, so that a second `set_up` replaces the first."""


def set_up(*, as_json: bool, level: str, namespace: str) -> None:
    """Send all lines of this process through one handler. It may be called again."""
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, Handler)]:
        root.removeHandler(old)
    handler = Handler(sys.stderr)
    handler.setFormatter(Formatter(as_json=as_json, colour=sys.stderr.isatty()))
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in ADOPTED:
        adopted = logging.getLogger(name)
        adopted.handlers.clear()
        adopted.propagate = True
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("uvicorn.access").addFilter(is_worth_a_line)
    identify(namespace=namespace, instance="-")


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Filter out successful probes: there are several per second, and they would hide the other lines."""
    path, status = (record.args[2], record.args[4]) if isinstance(record.args, tuple) else ("", 0)
    return not (status == 200 and str(path).startswith(PROBES))


def identify(**identity: str) -> None:
    """Add these fields to every line of this process from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Handler) and isinstance(handler.formatter, Formatter):
            handler.formatter.identity |= identity
