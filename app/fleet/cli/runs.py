"""Runs: the newest in a table, one in full or followed to its end, cancelled, or tried again."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperGroup

from app.fleet.cli.follow import follow, follow_all
from app.fleet.cli.terminal import (
    AsJson,
    at,
    changing,
    connected,
    load,
    one_line,
    own_name_as_typed,
    say,
    say_json,
    say_table,
)
from app.fleet.cli.terminal import took as duration
from app.fleet.cluster import commands
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool import Connection
from app.fleet.duration import MAX_AGE, format_duration, parse_duration
from app.fleet.engine.actions import admin
from app.fleet.runs import pages, records
from app.fleet.runs.pages import ListedRun
from app.fleet.runs.records import AGAIN, RunRecord, State
from app.fleet.settings import FleetSettings

LIMIT = 20
STATES: tuple[str, ...] = get_args(State)
COLUMNS = ("ID", "ACTION", "STATE", "ATTEMPT", "TRIGGER", "INSTANCE", "STARTED", "TOOK", "ERROR")

RunId = Annotated[int, typer.Argument(metavar="ID", min=1, max=2**63 - 1, help="Which run.")]


class Runs(TyperGroup):
    """`flotilla runs 17` is `flotilla runs show 17`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, ["show", *args] if args[0].isdecimal() else args)


app = typer.Typer(cls=Runs, rich_markup_mode=None)


def states(given: list[str] | None) -> list[str] | None:
    for each in given or []:
        if each not in STATES:
            raise typer.BadParameter(f"{each!r} is not one of {', '.join(STATES)}")
    return given


@app.callback(invoke_without_command=True)
def runs_command(
    context: typer.Context,
    action: Annotated[str | None, typer.Option(help="Of this action only.")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="|".join(STATES), callback=states, help="In this state only; may be given several times."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = LIMIT,
    follow_them: Annotated[
        bool, typer.Option("--follow", help="Show every change of state, from now on, instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the newest runs; `flotilla runs ID` shows one in full."""
    if context.invoked_subcommand is not None:
        if action or state or as_json or follow_them or limit != LIMIT:
            raise typer.BadParameter("what stands before an ID or a command is for the list: options come after it")
        return
    if follow_them:
        if limit != LIMIT:
            raise typer.BadParameter("--limit is for the list, and --follow has no end")
        follow_all(load(), action, state or [], as_json=as_json)
    rows = asyncio.run(newest(load(), action, state or [], limit))
    if as_json:
        say_json(rows)
    else:
        say_table(COLUMNS, map(cells, rows))


@app.command()
def show(
    run: RunId,
    follow_it: Annotated[bool, typer.Option("--follow", help="From its first event on, until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one run in full. `show` may be left out."""
    settings = load()
    if follow_it:
        follow(settings, run, as_json=as_json)
    record = asyncio.run(look(settings, run))
    if as_json:
        say_json(record)
        return
    say(headline(record))
    for name, value in details(record):
        say(f"  {name:<13}  {value.replace(chr(10), chr(10) + ' ' * 17)}")


@app.command()
def cancel(run: RunId, as_json: AsJson = False) -> None:
    """Cancel a run: at once if it waits; if it runs, its instance is told."""
    record = asyncio.run(do(load(), "runs cancel", records.cancel, run))
    if as_json:
        say_json(record)
    elif record.state == "running":
        say(f"run {run} of {record.action}: {record.instance} is told to end it; `{own_name_as_typed()} runs {run}`")
    else:
        say(headline(record))


@app.command()
def retry(run: RunId, as_json: AsJson = False) -> None:
    """Have a run tried again that failed or was cancelled; one that waits for its time is tried now."""
    record = asyncio.run(do(load(), "runs retry", records.retry, run))
    if as_json:
        say_json(record)
    else:
        say(headline(record))


@app.command(name="retry-all")
def retry_all(
    action: Annotated[str, typer.Option(help="Of this action.")],
    since: Annotated[
        str | None, typer.Option(metavar="2h", help="Those that ended at most so long ago; all, without.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="10m", help="And at least so long ago.")] = None,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="Those that were cancelled, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Have all runs of an action tried again that failed within some time."""
    states = [*AGAIN] if cancelled else ["failed"]
    count, left_out = asyncio.run(revive(load(), action, states, ago("--since", since), ago("--until", until)))
    if as_json:
        say_json({"retried": count} | ({"left_out": left_out} if left_out else {}))
        return
    say(f"{count} run{'' if count == 1 else 's'} of {action}: pending again")
    if left_out:
        say(f"{left_out} left out: the action allows one active run at a time (overlap='skip')")


def ago(option: str, given: str | None) -> timedelta | None:
    if given is None:
        return None
    try:
        value = parse_duration(given)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None
    if value > MAX_AGE:
        raise typer.BadParameter(f"{option}: at most {format_duration(MAX_AGE)}")
    return timedelta(seconds=value)


# -- asking -----------------------------------------------------------------------------------------------------------

Request = Callable[[Connection, Namespace, int], Awaitable[RunRecord]]


async def look(settings: FleetSettings, run: int) -> RunRecord:
    async with connected(settings) as (connection, namespace):
        return await records.find(connection, namespace, run)


async def do(settings: FleetSettings, command: str, request: Request, run: int) -> RunRecord:
    async with changing(settings) as (connection, namespace), connection.transaction():
        await commands.announce(connection, namespace, command, f"run {run}")
        return await request(connection, namespace, run)


async def revive(
    settings: FleetSettings, action: str, states: list[str], since: timedelta | None, until: timedelta | None
) -> records.Retried:
    async with changing(settings) as (connection, namespace):
        action_id = await admin.id_of(connection, namespace, action)
        count = await records.retry_many(connection, namespace, action_id, states=states, since=since, until=until)
        await commands.announce(connection, namespace, "runs retry-all", f"{action} {count.many} runs")
        return count


async def newest(settings: FleetSettings, action: str | None, states: list[str], limit: int) -> list[ListedRun]:
    async with connected(settings) as (connection, namespace):
        action_id = None if action is None else await admin.id_of(connection, namespace, action)
        return await pages.find_page(connection, namespace, action_id=action_id, states=states, limit=limit)


# -- showing ----------------------------------------------------------------------------------------------------------


def headline(run: RunRecord) -> str:
    return f"run {run.id} of {run.action}: {run.state}"


def cells(run: ListedRun) -> Iterator[str]:
    yield from (str(run.id), run.action, run.state, f"{run.attempt}/{run.max_attempts}", run.trigger)
    yield run.instance or ""
    if run.state == "pending":
        yield f"due {at(run.run_at)}" if run.run_at > datetime.now(UTC) else ""
        yield ""
    else:
        yield at(run.started_at)
        yield duration(run.started_at, run.finished_at)
    yield one_line(run.error or run.truncated.get("error", ""))


def details(run: RunRecord) -> Iterator[tuple[str, str]]:
    """What there is to say, and nothing about what there is not."""
    yield "trigger", run.trigger
    yield "attempt", f"{run.attempt} of {run.max_attempts}"
    if run.scheduled_for is not None:
        yield "scheduled for", at(run.scheduled_for)
    if run.ordering_key is not None:
        yield "ordering key", one_line(run.ordering_key)
    yield "created", at(run.created_at)
    if run.run_at != run.created_at:
        yield "due", at(run.run_at)
    if run.started_at is not None:
        yield "started", f"{at(run.started_at)} on {run.instance}"
    if run.finished_at is not None:
        yield "finished", at(run.finished_at)
    if run.started_at is not None and run.state != "pending":
        yield "took", duration(run.started_at, run.finished_at)
    yield "payload", one_line(run.payload)
    for name, value in (("progress", run.progress), ("result", run.result)):
        if value is not None:
            yield name, one_line(value)
    if run.error is not None:
        yield "error", run.error
