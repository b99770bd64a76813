"""Shared by all commands: the settings, a database session, and the output as text, tables or JSON.

Tables show local times; `--json` prints what the REST API would answer. Text from the database is not trusted: it is
printed without markup, and with its control characters escaped, because a terminal would interpret them.
"""

import contextlib
import importlib
import json
import shutil
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from os.path import relpath
from pathlib import Path
from typing import Annotated, Any

import psycopg
import pydantic_core
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.fleet.cluster.registry import Registry, Session
from app.fleet.db import dsn, migrations, preflight
from app.fleet.db.direct import open_session
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Connection, shows_an_outage
from app.fleet.errors import OutcomeUnknown, SchemaOutdated
from app.fleet.settings import FleetSettings
from app.fleet.telemetry.redaction import printable

# A table in a pipe is as wide as its contents: names that are cut to fit 80 columns would be useless.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
err = Console(stderr=True, highlight=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


# -- settings and sessions --------------------------------------------------------------------------------------------


def load_settings() -> FleetSettings:
    """Read the service's settings. Their class is imported by name, because the fleet imports nothing above it."""
    settings: type[FleetSettings] = importlib.import_module("app.settings").Settings
    return settings.load()


@contextlib.contextmanager
def session_for(settings: FleetSettings) -> Iterator[tuple[Session, Registry]]:
    """Open a session for the registry of instances."""
    addresses = dsn.resolve(settings, start=False)
    namespace = Namespace(settings.namespace)
    with (
        translate_errors(addresses),
        open_session(addresses.direct, application=namespace.application("cli"), lease=None) as session,
    ):
        if migrations.inspect(session, namespace) is migrations.State.ABSENT:
            raise namespace_absent(namespace, addresses)
        yield session, Registry(namespace)


@contextlib.asynccontextmanager
async def connect(settings: FleetSettings) -> AsyncIterator[tuple[Connection, Namespace]]:
    """Open an asynchronous connection for the engine's functions. Each statement commits by itself."""
    addresses = dsn.resolve(settings, start=False)
    namespace = Namespace(settings.namespace)
    with translate_errors(addresses):
        check_schema(addresses, namespace)
        # Acknowledged changes survive a crash, even if this database's default is `synchronous_commit=off`.
        # A command that is suspended in a transaction loses its locks after the same time as an instance.
        conninfo = dsn.with_options(
            addresses.direct,
            application=namespace.application("cli"),
            synchronous_commit="on",
            idle_in_transaction_session_timeout=5000,
        )
        async with await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as connection:
            yield connection, namespace


@contextlib.asynccontextmanager
async def connect_to_change(settings: FleetSettings) -> AsyncIterator[tuple[Connection, Namespace]]:
    """Open a connection for a command that changes something. If it breaks, raise `OutcomeUnknown`."""
    async with connect(settings) as (connection, namespace):
        try:
            yield connection, namespace
        except psycopg.Error as error:
            if not shows_an_outage(error):
                raise
            raise OutcomeUnknown(
                "the connection to PostgreSQL broke before it confirmed the change: check whether the change was made "
                "before you repeat the command"
            ) from error


@contextlib.contextmanager
def translate_errors(addresses: dsn.Addresses) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise preflight.translate(error, addresses) from error


def check_schema(addresses: dsn.Addresses, namespace: Namespace) -> None:
    with open_session(addresses.direct, application=namespace.application("cli"), lease=None) as session:
        state = migrations.inspect(session, namespace)
    if state is migrations.State.ABSENT:
        raise namespace_absent(namespace, addresses)
    if state is migrations.State.BEHIND:
        raise SchemaOutdated(
            f"the namespace {namespace.name!r} in {addresses.location} is older than this command: "
            f"run `flotilla migrate`"
        )


def namespace_absent(namespace: Namespace, addresses: dsn.Addresses) -> SchemaOutdated:
    return SchemaOutdated(
        f"the namespace {namespace.name!r} does not exist in {addresses.location}: `flotilla up` or `flotilla migrate` "
        f"creates it; FLOTILLA_NAMESPACE selects another namespace"
    )


# -- output -----------------------------------------------------------------------------------------------------------


def write(text: str) -> None:
    out.print(clean(text), markup=False, soft_wrap=True)


def warn(text: str) -> None:
    err.print(clean(text), markup=False, soft_wrap=True)


def write_json(value: Any) -> None:
    """Print a value as the REST API would, with times in ISO 8601 and UTC."""
    out.print_json(pydantic_core.to_json(value).decode())


def write_line(text: str) -> None:
    """Print a line as it is, and flush it: the reader of the pipe follows along."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def write_table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table. If it is too wide, its last column, such as an error, is cut first; then the others wrap."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # Rich narrows a column with `no_wrap` only after all columns without it.
        table.add_column(column, no_wrap=column != columns[-1])
    for row in rows:
        *others, last = row
        folded = [Text(clean(cell), no_wrap=False, overflow="fold") for cell in others]
        table.add_row(*folded, Text(clean(last), no_wrap=True, overflow="ellipsis"))
    out.print(table)


def clean(text: str) -> str:
    """Escape control characters, which could otherwise move the cursor."""
    return "\n".join(map(printable, text.split("\n")))


def one_line(value: Any) -> str:
    """Write text on one line, and anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.split())


def local_time(instant: datetime | None) -> str:
    """Format an instant in the local time zone."""
    return "" if instant is None else f"{instant.astimezone():%Y-%m-%d %H:%M:%S}"


def coarse_duration(since: datetime, until: datetime) -> str:
    seconds = max(0, int((until - since).total_seconds()))
    days, rest = divmod(seconds, 86400)
    return f"{days} d {rest // 3600} h" if days else f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"


def duration(since: datetime | None, until: datetime | None) -> str:
    """Format how long something took or, without an end, has taken so far."""
    if since is None:
        return ""
    until = until or datetime.now(UTC)
    seconds = max(0.0, (until - since).total_seconds())
    return (
        f"{seconds * 1000:.0f} ms"
        if seconds < 1
        else f"{seconds:.1f} s"
        if seconds < 60
        else coarse_duration(since, until)
    )


def command_name() -> str:
    """Return how to call this command line again, whether or not the virtual environment is active."""
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return "python -m app"
    return "flotilla" if shutil.which("flotilla") else relpath(script)
