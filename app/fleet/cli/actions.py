"""Actions: what there is, when each runs next and ran last, and where; pausing one, and letting it go on."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from app.fleet.cli.terminal import AsJson, at, changing, connected, load, say, say_json, say_table
from app.fleet.cluster import commands
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool import Connection
from app.fleet.engine.actions import admin
from app.fleet.engine.actions.action import Catalogue
from app.fleet.engine.actions.admin import ActionRecord
from app.fleet.settings import FleetSettings

COLUMNS = ("NAME", "SCHEDULE", "STATE", "NEXT RUN", "LAST RUN", "RUNNING ON", "STANDBY")
NAMES_SHOWN = 3

Name = Annotated[str, typer.Argument(help="Which action.")]
Change = Callable[[Connection, Namespace, str], Awaitable[None]]

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def actions_command(context: typer.Context, as_json: AsJson = False) -> None:
    """List all actions: when each runs next and ran last, and where."""
    if context.invoked_subcommand is not None:
        if as_json:
            raise typer.BadParameter("what stands before a command is for the list: options come after it")
        return
    rows = asyncio.run(everything(load()))
    if as_json:
        say_json(rows)
    else:
        say_table(COLUMNS, map(cells, rows))


@app.command()
def pause(name: Name, as_json: AsJson = False) -> None:
    """Have nothing of an action scheduled or started, until it is resumed; triggers are accepted and wait."""
    show(asyncio.run(change(load(), "actions pause", admin.pause, name)), as_json=as_json)


@app.command()
def resume(name: Name, as_json: AsJson = False) -> None:
    """Let a paused action go on, with its next slot and with the runs that wait."""
    show(asyncio.run(change(load(), "actions resume", admin.resume, name)), as_json=as_json)


# -- asking -----------------------------------------------------------------------------------------------------------


async def everything(settings: FleetSettings) -> list[ActionRecord]:
    async with connected(settings) as (connection, namespace):
        return await admin.find_all(connection, namespace, Catalogue.load(settings.actions))


async def change(settings: FleetSettings, command: str, what: Change, name: str) -> ActionRecord:
    async with changing(settings) as (connection, namespace):
        async with connection.transaction():
            await commands.announce(connection, namespace, command, name)
            await what(connection, namespace, name)
        return await admin.find(connection, namespace, Catalogue.load(settings.actions), name)


# -- showing ----------------------------------------------------------------------------------------------------------


def show(action: ActionRecord, *, as_json: bool) -> None:
    if as_json:
        say_json(action)
    else:
        following = f", next run {next_run(action)}" if action.next_run_at else ""
        say(f"{action.name}: {action.state}{following}")


def cells(action: ActionRecord) -> Iterator[str]:
    yield from (action.name, action.schedule or "", action.state, next_run(action), last_run(action))
    yield from (some(action.running_on), some(action.standby))


def next_run(action: ActionRecord) -> str:
    if action.next_run_at is None:
        return ""
    seconds = (action.next_run_at - datetime.now(UTC)).total_seconds()
    return f"{f'in {rough(seconds)}' if seconds > 0 else 'now'}, {at(action.next_run_at)}"


def last_run(action: ActionRecord) -> str:
    run = action.last_run
    if run is None:
        return ""
    since = run.finished_at or run.started_at or run.created_at
    return f"{run.state} {rough((datetime.now(UTC) - since).total_seconds())} ago"


def rough(seconds: float) -> str:
    """Write a distance in time the way people say it."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    return (
        f"{whole // 3600} h {whole // 60 % 60} min" if whole < 86400 else f"{whole // 86400} d {whole // 3600 % 24} h"
    )


def some(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
