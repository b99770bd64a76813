"""Runs over HTTP: create many at once, list and show them, cancel and retry them.

A page of runs is a range of ids, newest first. Its cursor is the last id, encoded so that clients treat it as opaque.
Runs that are created or deleted meanwhile therefore neither repeat nor hide others. `runs/read/pages.py` defines what a
list contains of each run.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, WithJsonSchema

from app.fleet.edge.audit import set_subject
from app.fleet.edge.auth import needs
from app.fleet.edge.context import Context, InContext
from app.fleet.edge.openapi import SCHEMA, described, problem_responses, without_default
from app.fleet.edge.problems import HttpError
from app.fleet.engine.actions import admin
from app.fleet.engine.enqueue import confirm
from app.fleet.engine.enqueue.insert import Triggered
from app.fleet.engine.enqueue.orders import Order
from app.fleet.errors import ActionUnknown, PayloadInvalid, RunUnknown
from app.fleet.http import idempotency
from app.fleet.http.bodies import (
    NEW_RUNS,
    RUN,
    NewRuns,
    actions_missing_here,
    answer,
    invalid_payloads,
    read,
    records,
)
from app.fleet.http.fields import Ago
from app.fleet.http.idempotency import IdempotencyKey
from app.fleet.runs import cancel, retry
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read import pages
from app.fleet.runs.read import records as runs
from app.fleet.runs.read.pages import ListedRun
from app.fleet.runs.read.records import RunRecord
from app.fleet.runs.retry import Retryable
from app.fleet.stream.relay import CHANGED

router = APIRouter(tags=["runs"], dependencies=[Depends(needs())])

MAX_ID = 2**63 - 1
MAX_RETRIED = 10_000
MAX_PAGE_BYTES = 1_000_000
STATES = TypeAdapter(list[RunState])

StateName = Annotated[str, WithJsonSchema({"$ref": SCHEMA.format(model=RunState.__name__)})]
States = Annotated[
    list[StateName] | None, Query(description="One or more states; repeat the parameter or separate them by commas")
]


async def number_of(
    run_id: Annotated[str, Path(alias="id", description="A whole number", json_schema_extra={"type": "integer"})],
) -> int:
    if not re.fullmatch(r"[0-9]+", run_id):
        raise HttpError("the id of a run is a whole number: use the `id` of a run as it is")
    if len(run_id) > len(str(MAX_ID)) or int(run_id) > MAX_ID:
        raise RunUnknown("there is no run with this id, and there has never been one: no id is that high")
    return int(run_id)


RunId = Annotated[int, Depends(number_of)]


@dataclass(frozen=True)
class RunList:
    runs: list[RunRecord]


@dataclass(frozen=True)
class RunPage:
    items: list[ListedRun]
    next_cursor: str | None


class RetryFilter(BaseModel):
    """The runs to retry."""

    model_config = ConfigDict(extra="forbid")

    action: str
    state: Annotated[
        list[Retryable], Field(min_length=1, description="Default: `failed`", json_schema_extra=without_default)
    ] = [RunState.FAILED]
    # The runs ended at most `since` ago and at least `until` ago.
    since: Ago = None
    until: Ago = None
    limit: Annotated[
        int, Field(ge=1, le=MAX_RETRIED, description=f"Default: {MAX_RETRIED}", json_schema_extra=without_default)
    ] = MAX_RETRIED


@dataclass(frozen=True)
class Retried:
    retried: int
    # More runs may match: send the request again.
    more: bool
    # Runs that were not retried, because the action has overlap="skip" and one run is active.
    left_out: Annotated[int, Field(exclude_if=lambda value: not value, json_schema_extra=without_default)] = 0


RETRY_FILTER = TypeAdapter(RetryFilter)
RETRIED = TypeAdapter(Retried)
RUN_LIST = TypeAdapter(RunList)
RUN_PAGE = TypeAdapter(RunPage)
LISTED_RUN = TypeAdapter(ListedRun)


@router.post(
    "/runs:batch",
    status_code=202,
    response_model=RunList,
    responses={
        200: {"model": RunList, "description": "The runs that an earlier request with this key created"},
        **problem_responses(404, 409),
    },
    openapi_extra=described(NewRuns),
)
async def trigger_runs(request: Request, context: InContext, idempotency_key: IdempotencyKey = None) -> Response:
    """Create many runs of any actions, all or none; they are returned in the same order."""
    orders = (await read(request, NEW_RUNS)).orders()
    try:
        triggered = await trigger(context, orders, idempotency_key)
    except ActionUnknown:
        raise await actions_missing_here(context, orders) from None
    except PayloadInvalid:
        raise invalid_payloads(context, orders) from None
    set_subject(request, f"{len(triggered)} runs from {min(each.id for each in triggered)}")
    created = await records(context, triggered)
    return answer(RUN_LIST, RunList(created), 202 if any(each.new for each in triggered) else 200)


@router.post(
    "/runs:retry", response_model=Retried, responses=problem_responses(404), openapi_extra=described(RetryFilter)
)
async def retry_runs(request: Request, context: InContext) -> Response:
    """Retry runs of an action that failed or were cancelled within a period; at most `limit` of them."""
    selection = await read(request, RETRY_FILTER)
    namespace = context.database.namespace
    async with context.database.autocommit() as connection:
        action_id = await admin.id_of(connection, namespace, selection.action)
        done = await retry.retry_runs(
            connection,
            namespace,
            action_id,
            states=selection.state,
            since=selection.since,
            until=selection.until,
            limit=selection.limit,
        )
    set_subject(request, f"{selection.action} {done.many} runs")
    more = done.many == selection.limit and not done.left_out
    return answer(RETRIED, Retried(done.many, more, done.left_out))


@router.get("/runs", response_model=RunPage, responses=problem_responses(400, 404))
async def list_runs(
    context: InContext,
    action: str | None = None,
    state: States = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: str | None = None,
) -> Response:
    """List runs, newest first, with extracts of long payloads and results. A page has at most 1 MB."""
    states, before = states_of(state or ()), before_of(cursor)
    namespace = context.database.namespace
    async with context.database.connection() as connection:
        action_id = None if action is None else await admin.id_of(connection, namespace, action)
        # One more than requested, to know whether there is another page.
        found = await pages.find_page(
            connection, namespace, action_id=action_id, states=states, limit=limit + 1, before=before
        )
    items = first_bytes(found[:limit], MAX_PAGE_BYTES)
    return answer(RUN_PAGE, RunPage(items, cursor_at(items[-1].id) if len(found) > len(items) else None))


@router.get("/runs/{id}", response_model=RunRecord, responses=problem_responses(400))
async def get_run(run_id: RunId, context: InContext) -> Response:
    """Show one run."""
    async with context.database.connection() as connection:
        return answer(RUN, await runs.find(connection, context.database.namespace, run_id))


@router.post("/runs/{id}/cancel", response_model=RunRecord, responses=problem_responses(400, 409))
async def cancel_run(run_id: RunId, context: InContext) -> Response:
    """Cancel a run: a pending one at once, a running one as soon as its instance has received the request."""
    async with context.database.autocommit() as connection:
        cancelled = await cancel.cancel_run(connection, context.database.namespace, run_id)
    context.stream.relay.notify(CHANGED, [run_id])
    return answer(RUN, cancelled)


@router.post("/runs/{id}/retry", response_model=RunRecord, responses=problem_responses(400, 409))
async def retry_run(run_id: RunId, context: InContext) -> Response:
    """Retry a run that failed or was cancelled; a pending run that waits for a later time becomes due now."""
    async with context.database.autocommit() as connection:
        return answer(RUN, await retry.retry_run(connection, context.database.namespace, run_id))


async def trigger(context: Context, orders: Sequence[Order], key: str | None) -> list[Triggered]:
    triggers, database = context.engine.triggers, context.database
    if key is None:
        return await confirm.trigger(triggers, orders, by="api")
    digest = idempotency.digest(orders)

    async def with_lock() -> list[Triggered]:
        async with idempotency.locked_connection(database, f"runs:batch:{key}") as connection:
            done = await triggers.trigger(idempotency.keyed(orders, key, digest), connection, by="api")
            await idempotency.store_batch(connection, database.namespace, key, digest, done[0].id)
            return done

    return await confirm.repeat_until_known(with_lock)


def states_of(given: Sequence[str]) -> list[RunState]:
    try:
        return STATES.validate_python([state.strip() for each in given for state in each.split(",")])
    except ValidationError:
        message = f"must be one of {', '.join(RunState)}"
        raise RequestValidationError([{"loc": ("query", "state"), "msg": message}]) from None


def first_bytes(items: Sequence[ListedRun], max_bytes: int) -> list[ListedRun]:
    """Return the first runs, up to this number of bytes, and at least one, so that paging always advances."""
    fitting: list[ListedRun] = []
    size = 0
    for item in items:
        size += len(LISTED_RUN.dump_json(item))
        if fitting and size > max_bytes:
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
    if found is None or int(found[1]) > MAX_ID:
        raise HttpError("invalid cursor: pass `next_cursor` of the previous page unchanged, or omit it")
    return int(found[1])
