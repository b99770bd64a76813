"""Commands about actions: list them with their schedules and runs, pause one, resume one."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from app.fleet.cli.terminal import (
    AsJson,
    connect,
    connect_to_change,
    load_settings,
    local_time,
    write,
    write_json,
    write_table,
)
from app.fleet.cluster import command_audit
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Connection
from app.fleet.engine.actions import admin
from app.fleet.engine.actions.admin import ActionRecord
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.settings import FleetSettings

COLUMNS = ("NAME", "SCHEDULE", "STATE", "NEXT RUN", "LAST RUN", "RUNNING ON", "STANDBY")
NAMES_SHOWN = 3

Name = Annotated[str, typer.Argument(help="Name of the action.")]
Change = Callable[[Connection, Namespace, str], Awaitable[None]]

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def actions_command(context: typer.Context, as_json: AsJson = False) -> None:
    """List all actions: their schedules, their next and last runs, and the instances that run them."""
    if context.invoked_subcommand is not None:
        if as_json:
            raise typer.BadParameter("an option before a command belongs to the list: write options after the command")
        return
    rows = asyncio.run(find_actions(load_settings()))
    if as_json:
        write_json(rows)
    else:
        write_table(COLUMNS, map(cells, rows))


@app.command()
def pause(name: Name, as_json: AsJson = False) -> None:
    """Pause an action: no run of it is scheduled or started until you resume it. Triggered runs wait."""
    show(asyncio.run(change(load_settings(), "actions pause", admin.pause, name)), as_json=as_json)


@app.command()
def resume(name: Name, as_json: AsJson = False) -> None:
    """Resume a paused action: its waiting runs start, and its schedule continues with the next slot."""
    show(asyncio.run(change(load_settings(), "actions resume", admin.resume, name)), as_json=as_json)


# -- requests ---------------------------------------------------------------------------------------------------------


async def find_actions(settings: FleetSettings) -> list[ActionRecord]:
    async with connect(settings) as (connection, namespace):
        return await admin.find_all(connection, namespace, Catalogue.load(settings.actions))


async def change(settings: FleetSettings, command: str, apply: Change, name: str) -> ActionRecord:
    async with connect_to_change(settings) as (connection, namespace):
        async with connection.transaction():
            await command_audit.notify_leader(connection, namespace, command, name)
            await apply(connection, namespace, name)
        return await admin.find(connection, namespace, Catalogue.load(settings.actions), name)


# -- output -----------------------------------------------------------------------------------------------------------


def show(action: ActionRecord, *, as_json: bool) -> None:
    if as_json:
        write_json(action)
    else:
        schedule = f", next run {next_run(action)}" if action.next_run_at else ""
        write(f"{action.name}: {action.state}{schedule}")


def cells(action: ActionRecord) -> Iterator[str]:
    yield from (action.name, action.schedule or "", action.state, next_run(action), last_run(action))
    yield from (abbreviated(action.running_on), abbreviated(action.standby))


def next_run(action: ActionRecord) -> str:
    if action.next_run_at is None:
        return ""
    seconds = (action.next_run_at - datetime.now(UTC)).total_seconds()
    return f"{f'in {rough_duration(seconds)}' if seconds > 0 else 'now'}, {local_time(action.next_run_at)}"


def last_run(action: ActionRecord) -> str:
    run = action.last_run
    if run is None:
        return ""
    since = run.finished_at or run.started_at or run.created_at
    return f"{run.state} {rough_duration((datetime.now(UTC) - since).total_seconds())} ago"


def rough_duration(seconds: float) -> str:
    """Format a duration roughly, such as `59 s`, `12 min` or `2 h 1 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    return (
        f"{whole // 3600} h {whole // 60 % 60} min" if whole < 86400 else f"{whole // 86400} d {whole // 3600 % 24} h"
    )


def abbreviated(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
