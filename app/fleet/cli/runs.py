"""Commands about runs: list the newest, show or follow one, cancel or retry one, retry many."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from app.fleet.cli.follow import follow, follow_all
from app.fleet.cli.terminal import (
    AsJson,
    command_name,
    connect,
    connect_to_change,
    duration,
    load_settings,
    local_time,
    one_line,
    write,
    write_json,
    write_table,
)
from app.fleet.cluster import command_audit
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Connection
from app.fleet.duration import MAX_AGE, format_duration, parse_duration
from app.fleet.engine.actions import admin
from app.fleet.runs import retry as run_retry
from app.fleet.runs.cancel import cancel_run
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read import pages, records, tracebacks
from app.fleet.runs.read.pages import ListedRun
from app.fleet.runs.read.records import RunRecord
from app.fleet.runs.read.tracebacks import StoredTraceback
from app.fleet.runs.retry import RETRYABLE, Retried
from app.fleet.settings import FleetSettings

LIMIT = 20
COLUMNS = ("ID", "ACTION", "STATE", "ATTEMPT", "TRIGGER", "INSTANCE", "STARTED", "TOOK", "ERROR")

RunId = Annotated[int, typer.Argument(metavar="ID", min=1, max=2**63 - 1, help="Id of the run.")]


class Runs(TyperGroup):
    """`flotilla runs 17` is `flotilla runs show 17`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, ["show", *args] if args[0].isdecimal() else args)


app = typer.Typer(cls=Runs, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def runs_command(
    context: typer.Context,
    action: Annotated[str | None, typer.Option(help="Only runs of this action.")] = None,
    state: Annotated[
        list[RunState] | None,
        typer.Option(metavar="|".join(RunState), help="Only runs in this state; may be repeated."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of runs.")] = LIMIT,
    follow_them: Annotated[
        bool, typer.Option("--follow", help="Show all state changes from now on, instead of a list.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the newest runs. `flotilla runs ID` shows one run in full."""
    if context.invoked_subcommand is not None:
        if action or state or as_json or follow_them or limit != LIMIT:
            raise typer.BadParameter(
                "an option before an ID or a command belongs to the list: write options after them"
            )
        return
    if follow_them:
        if limit != LIMIT:
            raise typer.BadParameter("--limit cannot be used with --follow")
        follow_all(load_settings(), action, state or [], as_json=as_json)
    rows = asyncio.run(find_newest(load_settings(), action, state or [], limit))
    if as_json:
        write_json(rows)
    else:
        write_table(COLUMNS, map(cells, rows))


@app.command()
def show(
    run: RunId,
    follow_it: Annotated[bool, typer.Option("--follow", help="Show all its events, until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one run in full. `flotilla runs ID` does the same."""
    settings = load_settings()
    if follow_it:
        follow(settings, run, as_json=as_json)
    record, latest = asyncio.run(find_run(settings, run))
    if as_json:
        write_json(record)
        return
    write(headline(record))
    for name, value in details(record, latest):
        write(f"  {name:<13}  {value.replace(chr(10), chr(10) + ' ' * 17)}")


@app.command()
def cancel(run: RunId, as_json: AsJson = False) -> None:
    """Cancel a run: at once if it is pending; if it is running, its instance is asked to stop it."""
    record = asyncio.run(change_run(load_settings(), "runs cancel", cancel_run, run))
    if as_json:
        write_json(record)
    elif record.state is RunState.RUNNING:
        write(f"run {run} of {record.action}: {record.instance} is asked to stop it; `{command_name()} runs {run}`")
    else:
        write(headline(record))


@app.command()
def retry(run: RunId, as_json: AsJson = False) -> None:
    """Retry a run that failed or was cancelled. A pending run that waits for its time is started now."""
    record = asyncio.run(change_run(load_settings(), "runs retry", run_retry.retry_run, run))
    if as_json:
        write_json(record)
    else:
        write(headline(record))


@app.command(name="retry-all")
def retry_all(
    action: Annotated[str, typer.Option(help="Retry the runs of this action.")],
    since: Annotated[
        str | None, typer.Option(metavar="2h", help="Only runs that ended within this duration (default: all).")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="10m", help="Only runs that ended longer ago than this (default: all).")
    ] = None,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="Also retry cancelled runs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Retry all failed runs of an action, or only those that ended within a period."""
    states = [*RETRYABLE] if cancelled else [RunState.FAILED]
    count, left_out = asyncio.run(
        retry_runs(load_settings(), action, states, parse_age("--since", since), parse_age("--until", until))
    )
    if as_json:
        write_json({"retried": count} | ({"left_out": left_out} if left_out else {}))
        return
    write(f"{count} run{'' if count == 1 else 's'} of {action}: pending again")
    if left_out:
        write(f"{left_out} left out: the action allows one active run at a time (overlap='skip')")


def parse_age(option: str, given: str | None) -> timedelta | None:
    if given is None:
        return None
    try:
        value = parse_duration(given)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None
    if value > MAX_AGE:
        raise typer.BadParameter(f"{option}: at most {format_duration(MAX_AGE)}")
    return timedelta(seconds=value)


# -- requests ---------------------------------------------------------------------------------------------------------

Request = Callable[[Connection, Namespace, int], Awaitable[RunRecord]]


async def find_run(settings: FleetSettings, run: int) -> tuple[RunRecord, list[StoredTraceback]]:
    """Return the run, and the traceback of its latest failed attempt, if there is one."""
    async with connect(settings) as (connection, namespace):
        record = await records.find(connection, namespace, run)
        return record, await tracebacks.find_tracebacks(connection, namespace, run, limit=1)


async def change_run(settings: FleetSettings, command: str, request: Request, run: int) -> RunRecord:
    async with connect_to_change(settings) as (connection, namespace), connection.transaction():
        await command_audit.notify_leader(connection, namespace, command, f"run {run}")
        return await request(connection, namespace, run)


async def retry_runs(
    settings: FleetSettings, action: str, states: list[RunState], since: timedelta | None, until: timedelta | None
) -> Retried:
    async with connect_to_change(settings) as (connection, namespace):
        action_id = await admin.id_of(connection, namespace, action)
        count = await run_retry.retry_runs(connection, namespace, action_id, states=states, since=since, until=until)
        await command_audit.notify_leader(connection, namespace, "runs retry-all", f"{action} {count.many} runs")
        return count


async def find_newest(
    settings: FleetSettings, action: str | None, states: list[RunState], limit: int
) -> list[ListedRun]:
    async with connect(settings) as (connection, namespace):
        action_id = None if action is None else await admin.id_of(connection, namespace, action)
        return await pages.find_page(connection, namespace, action_id=action_id, states=states, limit=limit)


# -- output -----------------------------------------------------------------------------------------------------------


def headline(run: RunRecord) -> str:
    return f"run {run.id} of {run.action}: {run.state}"


def cells(run: ListedRun) -> Iterator[str]:
    yield from (str(run.id), run.action, run.state, f"{run.attempt}/{run.max_attempts}", run.trigger)
    yield run.instance or ""
    if run.state is RunState.PENDING:
        yield f"due {local_time(run.run_at)}" if run.run_at > datetime.now(UTC) else ""
        yield ""
    else:
        yield local_time(run.started_at)
        yield duration(run.started_at, run.finished_at)
    yield one_line(run.error or run.truncated.get("error", ""))


def details(run: RunRecord, latest: list[StoredTraceback]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a run's details, without those that do not apply."""
    yield "trigger", run.trigger
    yield "attempt", f"{run.attempt} of {run.max_attempts}"
    if run.scheduled_for is not None:
        yield "scheduled for", local_time(run.scheduled_for)
    if run.ordering_key is not None:
        yield "ordering key", one_line(run.ordering_key)
    yield "created", local_time(run.created_at)
    if run.run_at != run.created_at:
        yield "due", local_time(run.run_at)
    if run.started_at is not None:
        yield "started", f"{local_time(run.started_at)} on {run.instance}"
    if run.finished_at is not None:
        yield "finished", local_time(run.finished_at)
    if run.started_at is not None and run.state is not RunState.PENDING:
        yield "took", duration(run.started_at, run.finished_at)
    yield "payload", one_line(run.payload)
    for name, value in (("progress", run.progress), ("result", run.result)):
        if value is not None:
            yield name, one_line(value)
    if run.error is not None:
        yield "error", run.error
        for each in latest:
            yield "traceback", f"attempt {each.attempt} on {each.instance}, {local_time(each.at)}\n{each.traceback}"
