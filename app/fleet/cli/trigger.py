"""`flotilla trigger`: check a run against the actions in the code, and insert it into PostgreSQL.

No instance needs to be running: the run waits for one. Nothing is written before all arguments are checked.
"""

import asyncio
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import Annotated, Any

import pydantic_core
import typer

from app.fleet.cli.follow import follow
from app.fleet.cli.terminal import AsJson, command_name, connect_to_change, load_settings, write, write_json
from app.fleet.cluster import command_audit
from app.fleet.engine.actions import admin
from app.fleet.engine.actions.action import PRIORITIES
from app.fleet.engine.actions.admin import ActionRecord
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.synchronise import read_ids
from app.fleet.engine.enqueue.insert import insert
from app.fleet.engine.enqueue.orders import Order, Origin, prepare
from app.fleet.errors import ActionUnknown, EngineError
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read import records
from app.fleet.runs.read.records import RunRecord
from app.fleet.settings import FleetSettings


def trigger_command(
    name: Annotated[str, typer.Argument(help="Name of the action.")],
    payload: Annotated[str | None, typer.Option(help="Payload as JSON; `-` reads it from standard input.")] = None,
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: a second trigger with it finds the first run.")
    ] = None,
    run_at: Annotated[
        str | None, typer.Option(help="Do not start before this time: ISO 8601 with a time zone.")
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(min=PRIORITIES[0], max=PRIORITIES[-1], help="Higher starts sooner (default: the action's)."),
    ] = None,
    ordering_key: Annotated[
        str | None, typer.Option(help="Run after all earlier runs of this action that have the same ordering key.")
    ] = None,
    follow_it: Annotated[bool, typer.Option("--follow", help="Show the events of the run until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run of an action; with --follow, wait for it and show its progress."""
    settings = load_settings()
    order = Order(name, parse_payload(payload), key, parse_run_at(run_at), priority, ordering_key)
    catalogue = Catalogue.load(settings.actions)
    if name not in catalogue:
        raise no_such_action(name, [each.name for each in catalogue], f"FLOTILLA_ACTIONS={','.join(settings.actions)}")
    triggered = asyncio.run(insert_one(settings, catalogue, order))
    if as_json:
        if not follow_it:
            write_json(triggered.run)
    else:
        for line in describe(triggered, follow_it=follow_it):
            write(line)
    if follow_it:
        follow(settings, triggered.run.id, as_json=as_json)


@dataclass(frozen=True)
class Triggered:
    """The run that the order has triggered or found, and its action."""

    run: RunRecord
    new: bool
    action: ActionRecord


async def insert_one(settings: FleetSettings, catalogue: Catalogue, order: Order) -> Triggered:
    async with connect_to_change(settings) as (connection, namespace):
        await read_ids(connection, namespace, catalogue)
        try:
            prepared = prepare(catalogue, order)
        except ActionUnknown:
            raise
        except EngineError as error:
            raise typer.BadParameter(str(error)) from error
        async with connection.transaction():
            (inserted,) = await insert(connection, namespace, [prepared], Origin("api"))
            await command_audit.notify_leader(connection, namespace, "trigger", f"{order.action} run {inserted.id}")
        run = await records.find(connection, namespace, inserted.id)
        return Triggered(run, inserted.new, await admin.find(connection, namespace, catalogue, order.action))


def describe(triggered: Triggered, *, follow_it: bool) -> Iterator[str]:
    run, me = triggered.run, command_name()
    if not triggered.new:
        yield f"this key has already triggered run {run.id}; no new run was added"
    if run.state is RunState.PENDING and triggered.action.state == "paused":
        yield f"{run.action} is paused: the run waits for `{me} actions resume {run.action}`"
    elif run.state is RunState.PENDING and not triggered.action.standby:
        yield f"no living instance executes {run.action}: the run waits for a worker that has it (`{me} list`)"
    if not follow_it:
        yield f"run {run.id} of {run.action}: {run.state}"
        yield f"  {me} runs {run.id} --follow"


def parse_payload(payload: str | None) -> Any:
    if payload is None:
        return None
    try:
        text = sys.stdin.buffer.read() if payload == "-" else payload.encode()
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise typer.BadParameter(f"the payload is not JSON: {error}", param_hint="'--payload'") from error


def parse_run_at(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not a time in ISO 8601, such as 2030-01-31T08:30:00+01:00", param_hint="'--run-at'"
        ) from error


def no_such_action(name: str, names: Iterable[str], where: str) -> ActionUnknown:
    names = sorted(names)
    close = get_close_matches(name, names, n=3)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = f"there are {', '.join(names[:20])}{', …' * (len(names) > 20)}" if names else "there are no actions"
    return ActionUnknown(f"there is no action {name!r} in {where}: {hint}")
