"""The command line, `flotilla`: tables for people, `--json` for programs, and exit codes (`epilog`).

Each noun has its own file; this file lists the commands. No command connects to an instance. `key`, `openapi`,
`version` and `logs` need nothing at all, `update` and `rename` the repository, and the others PostgreSQL, so they work
from any machine, also while no instance runs.
"""

import gc
import platform
import sys
from typing import NoReturn

import typer

from app import __version__
from app.fleet.cli import actions, clients, database, instances, locks, runs, trigger
from app.fleet.cli.terminal import warn, write
from app.fleet.errors import FleetError
from app.fleet.template import commands as template

app = typer.Typer(
    name="flotilla",
    help="Start, list and stop instances; list, trigger and pause actions; list, follow, cancel and retry runs.",
    epilog="Exit codes: 0 done · 1 failed, or doctor found a problem · 2 wrong usage, setting or payload · "
    "3 an instance refused to start · 4 the database cannot be used · 5 no such instance, action, run or lock",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command()(instances.serve)
app.command()(instances.up)
app.command(name="list")(instances.list_command)
app.command()(instances.down)
app.command(name="logs")(instances.logs_command)
app.add_typer(actions.app, name="actions")
app.command(name="trigger")(trigger.trigger_command)
app.add_typer(runs.app, name="runs")
app.command(name="locks")(locks.locks)
app.command()(locks.release)
app.command()(database.migrate)
app.command()(database.doctor)
app.command()(database.psql)
app.command()(clients.key)
app.command()(clients.openapi)
app.command()(template.update)
app.command()(template.rename)


@app.command()
def version() -> None:
    """Print the version of this checkout, and of Python."""
    write(f"flotilla {__version__} (Python {platform.python_version()})")


def main() -> NoReturn:
    # What has been imported is needed until the process ends. Without this, the garbage collector goes through all of
    # it then, which takes a third of the time of a short command.
    gc.freeze()
    try:
        app()
    except FleetError as error:
        warn(f"flotilla: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
