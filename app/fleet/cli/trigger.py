"""Triggering from the command line: checked by the code's own actions, inserted through PostgreSQL.

No instance needs to be up for that; the run waits for one. Nothing is written before everything was checked.
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
from app.fleet.cli.terminal import AsJson, changing, load, own_name_as_typed, say, say_json
from app.fleet.cluster import commands
from app.fleet.engine.actions import admin
from app.fleet.engine.actions.action import PRIORITIES, Catalogue
from app.fleet.engine.actions.admin import ActionRecord
from app.fleet.engine.actions.synchronise import learn_ids
from app.fleet.engine.enqueue.trigger import Order, insert, prepare
from app.fleet.errors import ActionUnknown, EngineError
from app.fleet.runs import records
from app.fleet.runs.records import RunRecord
from app.fleet.settings import FleetSettings


def trigger_command(
    name: Annotated[str, typer.Argument(help="Which action.")],
    payload: Annotated[str | None, typer.Option(help="Payload, as JSON; `-` reads it from standard input.")] = None,
    key: Annotated[str | None, typer.Option(help="A key makes one run; again, it finds that run.")] = None,
    run_at: Annotated[str | None, typer.Option(help="Not before then: ISO 8601, with a time zone.")] = None,
    priority: Annotated[
        int | None, typer.Option(min=PRIORITIES[0], max=PRIORITIES[-1], help="Higher is sooner; else the action's.")
    ] = None,
    ordering_key: Annotated[str | None, typer.Option(help="After all earlier runs of it with the same one.")] = None,
    follow_it: Annotated[bool, typer.Option("--follow", help="Show what becomes of it, until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Have an action run; with --follow, see it through."""
    settings = load()
    order = Order(name, parsed(payload), key, instant(run_at), priority, ordering_key)
    catalogue = Catalogue.load(settings.actions)
    if name not in catalogue:
        raise no_such_action(name, [each.name for each in catalogue], f"FLOTILLA_ACTIONS={','.join(settings.actions)}")
    made = asyncio.run(insert_one(settings, catalogue, order))
    if as_json:
        if not follow_it:
            say_json(made.run)
    else:
        for line in described(made, follow_it=follow_it):
            say(line)
    if follow_it:
        follow(settings, made.run.id, as_json=as_json)


@dataclass(frozen=True)
class Made:
    """What became of the order, and how its action stands."""

    run: RunRecord
    new: bool
    action: ActionRecord


async def insert_one(settings: FleetSettings, catalogue: Catalogue, order: Order) -> Made:
    async with changing(settings) as (connection, namespace):
        await learn_ids(connection, namespace, catalogue)
        try:
            prepared = prepare(catalogue, order)
        except ActionUnknown:
            raise
        except EngineError as error:
            raise typer.BadParameter(str(error)) from error
        async with connection.transaction():
            (done,) = await insert(connection, namespace, [prepared], "api")
            await commands.announce(connection, namespace, "trigger", f"{order.action} run {done.id}")
        run = await records.find(connection, namespace, done.id)
        return Made(run, done.new, await admin.find(connection, namespace, catalogue, order.action))


def described(made: Made, *, follow_it: bool) -> Iterator[str]:
    run, me = made.run, own_name_as_typed()
    if not made.new:
        yield f"run {run.id} was made with this key before; nothing was added"
    if run.state == "pending" and made.action.state == "paused":
        yield f"{run.action} is paused: the run waits for `{me} actions resume {run.action}`"
    elif run.state == "pending" and not made.action.standby:
        yield f"no living instance has {run.action} in its code: the run waits for one (`{me} list`)"
    if not follow_it:
        yield f"run {run.id} of {run.action}: {run.state}"
        yield f"  {me} runs {run.id} --follow"


def parsed(payload: str | None) -> Any:
    if payload is None:
        return None
    try:
        text = sys.stdin.buffer.read() if payload == "-" else payload.encode()
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise typer.BadParameter(f"this is not JSON: {error}", param_hint="'--payload'") from error


def instant(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not an instant in ISO 8601, such as 2030-01-31T08:30:00+01:00", param_hint="'--run-at'"
        ) from error


def no_such_action(name: str, names: Iterable[str], where: str) -> ActionUnknown:
    names = sorted(names)
    close = get_close_matches(name, names, n=3)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = f"there are {', '.join(names[:20])}{', …' * (len(names) > 20)}" if names else "there are none at all"
    return ActionUnknown(f"there is no action {name!r} in {where}: {hint}")
