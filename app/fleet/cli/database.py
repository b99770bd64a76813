"""Commands about the database: `migrate`, `doctor` and `psql`."""

import dataclasses
import os
import shutil
import sys
from typing import Annotated

import typer
from psycopg.conninfo import conninfo_to_dict

from app.fleet.cli.doctor import Level, examine
from app.fleet.cli.terminal import AsJson, load_settings, write, write_json
from app.fleet.db import dsn, embedded, migrations, preflight
from app.fleet.db.migrations import LOCK_TIMEOUT
from app.fleet.db.namespace import Namespace
from app.fleet.errors import FleetError
from app.fleet.telemetry import logs

# The environment variables of libpq for the parts of an address.
OF_LIBPQ = {
    "host": "PGHOST",
    "hostaddr": "PGHOSTADDR",
    "port": "PGPORT",
    "user": "PGUSER",
    "password": "PGPASSWORD",
    "dbname": "PGDATABASE",
    "sslmode": "PGSSLMODE",
    "sslrootcert": "PGSSLROOTCERT",
}


def migrate(
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait while another process migrates.")] = LOCK_TIMEOUT,
) -> None:
    """Migrate the schema of the namespace to the newest revision. It may run anywhere, and several times at once."""
    settings = load_settings()
    logs.set_up(as_json=settings.logs_as_json, level=settings.log_level, namespace=settings.namespace)
    addresses = dsn.resolve(settings)
    preflight.check_direct(addresses)
    done = migrations.migrate(addresses.direct, Namespace(settings.namespace), wait=wait)
    write(f"{settings.namespace}: {'migrated' if done else 'already up to date'}")


def psql(
    command: Annotated[str | None, typer.Option("--command", "-c", help="Execute this, and end.")] = None,
) -> None:
    """Open psql on the database of the service, with the tables of the namespace in the search path."""
    settings = load_settings()
    given = conninfo_to_dict(dsn.resolve(settings).direct)
    program = shutil.which("psql")
    if program is None:
        if not settings.embedded:
            raise FleetError("psql is not installed: install the client programs of PostgreSQL")
        program = str(embedded.Server(settings.embedded_dir).binaries / "psql")
    # In the environment, not as an argument: other users of the machine can see the arguments of a process.
    os.environ.update(
        {variable: str(given[name]) for name, variable in OF_LIBPQ.items() if given.get(name) is not None}
    )
    os.environ["PGOPTIONS"] = f"-c search_path={Namespace(settings.namespace).schema},public"
    arguments = [] if command is None else ["--command", command]
    os.execv(program, ["psql", *arguments])  # noqa: S606 — the program is psql


def doctor(
    instances: Annotated[
        int | None, typer.Option(min=1, help="Also check whether the server allows so many instances.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check settings, database, schema, clock, privileges, connection budget, pooler and encryption for problems."""
    findings = examine(load_settings(), instances)
    if as_json:
        write_json([dataclasses.asdict(finding) for finding in findings])
    else:
        for finding in findings:
            write(f"{finding.level.value:<7}  {finding.subject:<20}  {finding.detail}")
    if any(finding.level is Level.PROBLEM for finding in findings):
        sys.exit(1)
