"""Logs are events: a name and fields, one line each, always with namespace, instance and request.

    log = events(__name__)
    log.info("link.lost", reason="timeout", silent_ms=2510)

In production a line is a JSON object; at a terminal it is made to be read. uvicorn's, Alembic's and every other
library's lines go through the same handler and carry the same fields. Values that look like a connection string lose
their password on the way out, whoever wrote them.

What it does not promise: lines of uvicorn's own supervisor (`--workers`, `--reload`), which never loads the service.
"""

import json
import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

PASSWORD = re.compile(r"(://[^:/@\s]*:)[^@\s]*(@)|(\bpassword\s*=\s*)('(?:[^'\\]|\\.)*'|\S+)", re.IGNORECASE)
COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[41m"}
# Loggers that would otherwise write lines of their own shape (uvicorn) or far too many of them.
ADOPTED = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "alembic", "fastapi")
QUIET = ("psycopg.pool", "alembic.runtime.plugins", "watchfiles")
PROBES = ("/health/live", "/health/ready")


def redact(text: str) -> str:
    """Take passwords out of connection strings."""
    return PASSWORD.sub(lambda m: f"{m[1] or m[3]}***{m[2] or ''}", text)


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
        fields = dict(getattr(record, "fields", {}))
        trace = self.formatException(record.exc_info) if record.exc_info else None
        text = self._json(record, fields, trace) if self._as_json else self._text(record, fields, trace)
        return redact(text)

    def _json(self, record: logging.LogRecord, fields: dict[str, Any], trace: str | None) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **self.identity,
            "request_id": request_id.get(),
            "logger": record.name,
            **fields,
        }
        if trace:
            line["error"] = trace
        return json.dumps(line, default=str, ensure_ascii=False)

    def _text(self, record: logging.LogRecord, fields: dict[str, Any], trace: str | None) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        who = "/".join(self.identity.values())
        words = [when, f"{record.levelname:<7}", who, record.getMessage()]
        words += [f"{key}={value}" for key, value in fields.items()]
        if rid := request_id.get():
            words.append(f"request_id={rid}")
        line = " ".join(words) + (f"\n{trace}" if trace else "")
        colour = COLOURS.get(record.levelname) if self._colour else None
        return f"{colour}{line}\x1b[0m" if colour else line


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
