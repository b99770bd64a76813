"""What every command needs: the settings, a session, and how things are shown to people and to machines.

People get tables and local times; `--json` prints what the REST API would answer. Whatever comes out of the database
was written by somebody, so it is shown without markup, and without the control characters a terminal would obey.
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

from app.fleet.cluster.registry import Register, Session
from app.fleet.db import dsn, migrations, preflight
from app.fleet.db.direct import open_session
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool import Connection, shows_an_outage
from app.fleet.errors import OutcomeUnknown, SchemaOutdated
from app.fleet.settings import FleetSettings

# Piped, a table is as wide as it needs to be: a name cut to fit 80 columns helps nobody.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
err = Console(stderr=True, highlight=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


# -- settings and sessions --------------------------------------------------------------------------------------------


def load() -> FleetSettings:
    """Read the service's settings, its own fields included; by name, because the fleet imports nothing above it."""
    settings: type[FleetSettings] = importlib.import_module("app.settings").Settings
    return settings.load()


@contextlib.contextmanager
def session_for(settings: FleetSettings) -> Iterator[tuple[Session, Register]]:
    """Open a session on the register, or say why there is none."""
    addresses = dsn.resolve(settings)
    namespace = Namespace(settings.namespace)
    with translated(addresses), open_session(addresses.direct, application=name_of(namespace), lease=None) as session:
        if migrations.inspect(session, namespace) is migrations.State.ABSENT:
            raise absent(namespace, addresses)
        yield session, Register(namespace)


@contextlib.asynccontextmanager
async def connected(settings: FleetSettings) -> AsyncIterator[tuple[Connection, Namespace]]:
    """Open a connection for what the engine has to say, which is asynchronous; every statement commits by itself."""
    addresses = dsn.resolve(settings)
    namespace = Namespace(settings.namespace)
    with translated(addresses):
        check_schema(addresses, namespace)
        # What was acknowledged survives, whatever this database's shortcut for others is.
        # And a command that is stopped half-way keeps no lock for longer than an instance may.
        conninfo = dsn.with_options(
            addresses.direct,
            application=name_of(namespace),
            synchronous_commit="on",
            idle_in_transaction_session_timeout=5000,
        )
        async with await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as connection:
            yield connection, namespace


@contextlib.asynccontextmanager
async def changing(settings: FleetSettings) -> AsyncIterator[tuple[Connection, Namespace]]:
    """Open a connection for a command that changes something; if it breaks, the outcome is unknown."""
    async with connected(settings) as (connection, namespace):
        try:
            yield connection, namespace
        except psycopg.Error as error:
            if not shows_an_outage(error):
                raise
            raise OutcomeUnknown(
                "the connection to PostgreSQL broke before it confirmed the change: look whether the change is there "
                "before you repeat the command"
            ) from error


@contextlib.contextmanager
def translated(addresses: dsn.Addresses) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise preflight.translate(error, addresses) from error


def check_schema(addresses: dsn.Addresses, namespace: Namespace) -> None:
    with open_session(addresses.direct, application=name_of(namespace), lease=None) as session:
        state = migrations.inspect(session, namespace)
    if state is migrations.State.ABSENT:
        raise absent(namespace, addresses)
    if state is migrations.State.BEHIND:
        raise SchemaOutdated(
            f"the namespace {namespace.name!r} in {addresses.place} is older than this command: run `flotilla migrate`"
        )


def absent(namespace: Namespace, addresses: dsn.Addresses) -> SchemaOutdated:
    return SchemaOutdated(
        f"the namespace {namespace.name!r} does not exist in {addresses.place}: `flotilla up` or `flotilla migrate` "
        f"makes it; FLOTILLA_NAMESPACE chooses another"
    )


def name_of(namespace: Namespace) -> str:
    return f"flotilla/{namespace.name}/cli"


# -- showing ----------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    out.print(clean(text), markup=False, soft_wrap=True)


def warn(text: str) -> None:
    err.print(clean(text), markup=False, soft_wrap=True)


def say_json(value: Any) -> None:
    """Print it as the REST API would: instants in ISO 8601, in UTC."""
    out.print_json(pydantic_core.to_json(value).decode())


def say_line(text: str) -> None:
    """Print it as it is, and at once: whoever reads this reads along."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say_table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table. Its last column, such as an error, is cut where there is no room; the others fold after that."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # A column that may not wrap keeps its width while there is another one that may.
        table.add_column(column, no_wrap=column != columns[-1])
    for row in rows:
        *others, last = row
        folded = [Text(clean(cell), no_wrap=False, overflow="fold") for cell in others]
        table.add_row(*folded, Text(clean(last), no_wrap=True, overflow="ellipsis"))
    out.print(table)


def clean(text: str) -> str:
    """Make control characters visible, instead of letting them move the cursor."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def one_line(value: Any) -> str:
    """Write text on one line, and anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.split())


def at(instant: datetime | None) -> str:
    """Show an instant in the time zone of whoever looks."""
    return "" if instant is None else f"{instant.astimezone():%Y-%m-%d %H:%M:%S}"


def lasted(since: datetime, until: datetime) -> str:
    seconds = max(0, int((until - since).total_seconds()))
    days, rest = divmod(seconds, 86400)
    return f"{days} d {rest // 3600} h" if days else f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"


def took(since: datetime | None, until: datetime | None) -> str:
    """Say how long something took, or takes already; to the millisecond while that matters."""
    if since is None:
        return ""
    until = until or datetime.now(UTC)
    seconds = max(0.0, (until - since).total_seconds())
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 60 else lasted(since, until)


def own_name_as_typed() -> str:
    """Say how to call this command again, whether or not the virtual environment is active."""
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return "python -m app"
    return "flotilla" if shutil.which("flotilla") else relpath(script)
