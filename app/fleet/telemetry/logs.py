"""Logs are events: a name and fields, one line each, always with namespace, instance and request.

    log = events(__name__)
    log.info("link.lost", reason="timeout", silent_ms=2510)

In production a line is a JSON object; at a terminal it is text for people. The lines of uvicorn, Alembic and every
other library go through the same handler and carry the same fields.

Every value is redacted (`redaction.py`), bounded in length, and only then formatted. So a line of JSON is always valid
JSON, and nobody who can put a text into a log line can forge a second one: in the text format, control characters are
escaped and every line of a traceback is indented.

What it does not promise: lines of uvicorn's own supervisor (`--workers`, `--reload`), which never loads the service.
"""

import json
import logging
import math
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from app.fleet.telemetry.redaction import HIDDEN, printable, redact

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

# How many characters of a field, and of a traceback, a line may have. Of a longer traceback both ends are kept.
FIELD_LONGEST = 4_000
TRACE_LONGEST = 16_000
DEEPEST = 5
COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[41m"}
# Loggers that would otherwise write lines of their own shape (uvicorn) or far too many of them.
ADOPTED = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "alembic", "fastapi")
QUIET = ("psycopg.pool", "alembic.runtime.plugins", "watchfiles")
PROBES = ("/health/live", "/health/ready")


class Events:
    """A logger whose lines are an event name and fields."""

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


def events(name: str) -> Events:
    return Events(logging.getLogger(name))


class Formatter(logging.Formatter):
    """Both shapes of a line. `identity` is what is true of the whole process."""

    def __init__(self, *, as_json: bool, colour: bool = False) -> None:
        super().__init__()
        self.identity: dict[str, str] = {}
        self._as_json = as_json
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        fields = {key: safe(value) for key, value in getattr(record, "fields", {}).items()}
        event = clean(message_of(record), FIELD_LONGEST)
        trace = None
        if record.exc_info:
            trace = clean(self._trace_of(record), TRACE_LONGEST, keep_end=True)
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
            "request_id": request_id.get(),
            "logger": record.name,
            **fields,
        }
        if trace:
            line["error"] = trace
        # `json.dumps` escapes the first 32 control characters alone. The others can occur only within strings.
        return printable_json(json.dumps(line, ensure_ascii=False))

    def _text(self, record: logging.LogRecord, event: str, fields: dict[str, Any], trace: str | None) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        who = "/".join(self.identity.values())
        words = [when, f"{record.levelname:<7}", who, printable(event)]
        words += [f"{key}={word(value)}" for key, value in fields.items()]
        if rid := request_id.get():
            words.append(f"request_id={word(rid)}")
        line = " ".join(words)
        if trace:
            # Indented, so that no line of an exception's text looks like one of the log's own.
            line = "\n    ".join([line, *(printable(part) for part in trace.split("\n"))])
        colour = COLOURS.get(record.levelname) if self._colour else None
        return f"{colour}{line}\x1b[0m" if colour else line


def message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except BaseException:  # noqa: BLE001 — an argument's `__str__` may do anything, and the line is wanted all the same
        return str(record.msg)


def safe(value: Any, depth: int = 0) -> Any:
    """Return the value as JSON can carry it: redacted, bounded, and without anything that `json.dumps` refuses."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int):
        # Python refuses to write integers of more than 4,300 digits.
        return int(value) if value.bit_length() <= 128 else f"(an integer of {value.bit_length()} bits)"
    if depth < DEEPEST:
        if isinstance(value, Mapping):
            # Written as `name=value` first, so that a value is hidden for the name it stands under.
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
    return clean(text, FIELD_LONGEST)


def clean(text: str, longest: int, *, keep_end: bool = False) -> str:
    """Redact a text; cut it if it is too long, and say how much is missing."""
    length = len(text)
    text = redact(text)
    if len(text) <= longest:
        return text
    missing = f"… ({max(length, len(text)) - longest} more characters) …"
    if keep_end:
        return f"{text[: longest // 2]}\n{missing}\n{text[-(longest - longest // 2) :]}"
    return text[:longest] + missing


def word(value: Any) -> str:
    """Write a field's value for people: as it is, or in quotes where it would otherwise be read as something else."""
    text = str(value)
    if not text or any(each in text for each in ' ="') or not text.isprintable():
        return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'
    return text


def printable_json(text: str) -> str:
    if text.isascii() or text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


class Handler(logging.StreamHandler[Any]):
    """Marks the handler as ours, so that setting up twice leaves one."""


def set_up(*, as_json: bool, level: str, namespace: str) -> None:
    """Send every line of this process through one handler. Safe to call again."""
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
    logging.getLogger("uvicorn.access").addFilter(tells_something)
    identify(namespace=namespace, instance="-")


def tells_something(record: logging.LogRecord) -> bool:
    """Leave out the probes that found all well: several a second, for ever, they would hide the rest."""
    path, status = (record.args[2], record.args[4]) if isinstance(record.args, tuple) else ("", 0)
    return not (status == 200 and str(path).startswith(PROBES))


def identify(**identity: str) -> None:
    """Say who this process is, on every line from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Handler) and isinstance(handler.formatter, Formatter):
            handler.formatter.identity |= identity
