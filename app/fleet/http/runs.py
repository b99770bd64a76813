"""Runs over HTTP: trigger many at once, see them, cancel one, have one tried again.

A page of runs is a slice by id, newest first, and its cursor is the last id, written so that nobody takes it for one:
runs that come or go meanwhile neither repeat nor hide others. What a list has of a run is in `runs/pages.py`.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, get_args

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from app.fleet.engine.actions import admin
from app.fleet.engine.enqueue import confirm
from app.fleet.engine.enqueue.trigger import Order, Triggered
from app.fleet.errors import ActionUnknown, PayloadInvalid, RunUnknown
from app.fleet.http import idempotency
from app.fleet.http.bodies import (
    NEW_RUNS,
    RUN,
    BatchedRun,
    NewRuns,
    answer,
    described,
    misfits,
    not_these,
    read,
    records,
)
from app.fleet.http.edge.audit import set_subject
from app.fleet.http.edge.auth import needs
from app.fleet.http.edge.context import Context, InContext
from app.fleet.http.edge.openapi import problem_responses
from app.fleet.http.edge.problems import HttpError
from app.fleet.http.fields import Ago
from app.fleet.http.idempotency import IdempotencyKey
from app.fleet.runs import pages
from app.fleet.runs import records as runs
from app.fleet.runs.pages import ListedRun
from app.fleet.runs.records import Again, RunRecord, State
from app.fleet.stream.relay import CHANGED

router = APIRouter(tags=["runs"], dependencies=[Depends(needs())])

GREATEST_ID = 2**63 - 1
RETRIED_MOST = 10_000
# How many bytes a page of runs has at most.
PAGE_MOST = 1_000_000
STATES = TypeAdapter(list[State])

RunId = Annotated[str, Path(alias="id", description="A whole number")]


@dataclass(frozen=True)
class RunList:
    runs: list[RunRecord]


@dataclass(frozen=True)
class RunPage:
    items: list[ListedRun]
    next_cursor: str | None


class RetryWanted(BaseModel):
    """Which runs are to be tried again."""

    model_config = ConfigDict(extra="forbid")

    action: str
    state: Annotated[list[Again], Field(min_length=1)] = ["failed"]
    # How long ago they ended: at most, and at least.
    since: Ago = None
    until: Ago = None
    limit: Annotated[int, Field(ge=1, le=RETRIED_MOST)] = RETRIED_MOST


@dataclass(frozen=True)
class Retried:
    retried: int
    # There may be more: ask again.
    more: bool
    # Of an action with overlap="skip": how many were not tried again, because one run of it at a time is active.
    left_out: Annotated[int, Field(exclude_if=lambda value: not value)] = 0


RETRY_WANTED = TypeAdapter(RetryWanted)
RETRIED = TypeAdapter(Retried)
RUN_LIST = TypeAdapter(RunList)
RUN_PAGE = TypeAdapter(RunPage)
LISTED_RUN = TypeAdapter(ListedRun)


@router.post(
    "/runs:batch",
    status_code=202,
    response_model=RunList,
    responses={
        200: {"model": RunList, "description": "The runs that these keys have made before"},
        **problem_responses(404, 409),
    },
    openapi_extra=described(NewRuns, runs=BatchedRun),
)
async def trigger_many(request: Request, context: InContext, idempotency_key: IdempotencyKey = None) -> Response:
    """Have many runs, of any actions, all or none; they are returned in the same order."""
    orders = (await read(request, NEW_RUNS)).orders()
    try:
        triggered = await trigger(context, orders, idempotency_key)
    except ActionUnknown:
        raise await not_these(context, orders) from None
    except PayloadInvalid:
        raise misfits(context, orders) from None
    set_subject(request, f"{len(triggered)} runs from {min(each.id for each in triggered)}")
    made = await records(context, triggered)
    return answer(RUN_LIST, RunList(made), 202 if any(each.new for each in triggered) else 200)


@router.post(
    "/runs:retry", response_model=Retried, responses=problem_responses(404), openapi_extra=described(RetryWanted)
)
async def retry_many(request: Request, context: InContext) -> Response:
    """Have runs of an action tried again that failed, or were cancelled, within some time; up to `limit` of them."""
    wanted = await read(request, RETRY_WANTED)
    namespace = context.database.namespace
    async with context.database.autocommit() as connection:
        action_id = await admin.id_of(connection, namespace, wanted.action)
        done = await runs.retry_many(
            connection,
            namespace,
            action_id,
            states=wanted.state,
            since=wanted.since,
            until=wanted.until,
            most=wanted.limit,
        )
    set_subject(request, f"{wanted.action} {done.many} runs")
    more = done.many == wanted.limit and not done.left_out
    return answer(RETRIED, Retried(done.many, more, done.left_out))


@router.get("/runs", response_model=RunPage, responses=problem_responses(400, 404))
async def list_runs(
    context: InContext,
    action: str | None = None,
    state: Annotated[list[str] | None, Query(description="One or more, repeated or with commas between")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: str | None = None,
) -> Response:
    """List runs, newest first, with extracts of what is long; a page ends early at 1 MB."""
    states, before = states_of(state or ()), before_of(cursor)
    namespace = context.database.namespace
    async with context.database.connection() as connection:
        action_id = None if action is None else await admin.id_of(connection, namespace, action)
        # One more than wanted says whether there is another page.
        found = await pages.find_page(
            connection, namespace, action_id=action_id, states=states, limit=limit + 1, before=before
        )
    items = within(PAGE_MOST, found[:limit])
    return answer(RUN_PAGE, RunPage(items, cursor_at(items[-1].id) if len(found) > len(items) else None))


@router.get("/runs/{id}", response_model=RunRecord, responses=problem_responses(400))
async def show_run(run_id: RunId, context: InContext) -> Response:
    """Show one run."""
    number = number_of(run_id)
    async with context.database.connection() as connection:
        return answer(RUN, await runs.find(connection, context.database.namespace, number))


@router.post("/runs/{id}/cancel", response_model=RunRecord, responses=problem_responses(400, 409))
async def cancel_run(run_id: RunId, context: InContext) -> Response:
    """Cancel a run: at once if it waits; if it runs, as soon as its instance, wherever that is, has heard of it."""
    number = number_of(run_id)
    async with context.database.autocommit() as connection:
        cancelled = await runs.cancel(connection, context.database.namespace, number)
    context.stream.relay.notify(CHANGED, [number])
    return answer(RUN, cancelled)


@router.post("/runs/{id}/retry", response_model=RunRecord, responses=problem_responses(400, 409))
async def retry_run(run_id: RunId, context: InContext) -> Response:
    """Have a run tried again that failed or was cancelled; one that waits for a later time is tried now."""
    number = number_of(run_id)
    async with context.database.autocommit() as connection:
        return answer(RUN, await runs.retry(connection, context.database.namespace, number))


async def trigger(context: Context, orders: Sequence[Order], key: str | None) -> list[Triggered]:
    triggers, database = context.engine.triggers, context.database
    if key is None:
        return await confirm.trigger(triggers, orders, by="api")
    wanted = idempotency.digest(orders)

    async def in_turn() -> list[Triggered]:
        async with idempotency.turn(database, f"runs:batch:{key}") as connection:
            done = await triggers.trigger(idempotency.keyed(orders, key, wanted), connection, by="api")
            await idempotency.remember_batch(connection, database.namespace, key, wanted, done[0].id)
            return done

    return await confirm.repeated(in_turn)


def number_of(run_id: str) -> int:
    if not re.fullmatch(r"[0-9]+", run_id):
        raise HttpError("the id of a run is a whole number, as `id` of a run has it")
    if len(run_id) > len(str(GREATEST_ID)) or int(run_id) > GREATEST_ID:
        raise RunUnknown("there is no run of that id, and none before it either: ids have not come that far")
    return int(run_id)


def states_of(given: Sequence[str]) -> list[State]:
    try:
        return STATES.validate_python([state.strip() for each in given for state in each.split(",")])
    except ValidationError:
        message = f"a state is one of {', '.join(get_args(State))}"
        raise RequestValidationError([{"loc": ("query", "state"), "msg": message}]) from None


def within(most: int, items: Sequence[ListedRun]) -> list[ListedRun]:
    """Return the first of these, up to so many bytes; the first in any case, so that each page has a next one."""
    fitting: list[ListedRun] = []
    size = 0
    for item in items:
        size += len(LISTED_RUN.dump_json(item))
        if fitting and size > most:
            break
        fitting.append(item)
    return fitting


def cursor_at(run_id: int) -> str:
    return base64.urlsafe_b64encode(f"before {run_id}".encode()).decode().rstrip("=")


def before_of(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    try:
        found = re.fullmatch(rb"before ([0-9]{1,19})", base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError):
        found = None
    if found is None or int(found[1]) > GREATEST_ID:
        raise HttpError("this cursor is none of ours: take `next_cursor` of the page before, as it is, or none at all")
    return int(found[1])
