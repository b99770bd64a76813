"""Actions over HTTP: list, show, trigger, pause and resume them.

Listing and pausing use the database alone, so they work at every instance, whatever its release. Triggering needs the
code of the action, which defines its payload. An instance of any role that serves this path has that code, and accepts
the trigger whether or not an instance executes the action at the moment: the run waits. An instance whose release does
not have the action answers with 503, and a client that retries reaches, during a deploy, an instance that has it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from fastapi import APIRouter, Depends, Request, Response
from pydantic import TypeAdapter

from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Connection
from app.fleet.edge.audit import set_subject
from app.fleet.edge.auth import needs
from app.fleet.edge.context import Context, InContext
from app.fleet.edge.elsewhere import action_missing_here
from app.fleet.edge.openapi import described, problem_responses
from app.fleet.engine.actions import admin
from app.fleet.engine.actions.admin import ActionRecord
from app.fleet.engine.enqueue import confirm
from app.fleet.engine.enqueue.insert import Triggered
from app.fleet.engine.enqueue.orders import Order
from app.fleet.errors import ActionUnknown
from app.fleet.http import idempotency
from app.fleet.http.bodies import NEW_RUN, RUN, NewRun, answer, read, records
from app.fleet.http.idempotency import IdempotencyKey
from app.fleet.runs.read.records import RunRecord

router = APIRouter(prefix="/actions", tags=["actions"], dependencies=[Depends(needs())])


@dataclass(frozen=True)
class ActionList:
    items: list[ActionRecord]


ACTION = TypeAdapter(ActionRecord)
ACTION_LIST = TypeAdapter(ActionList)


@router.get("", response_model=ActionList)
async def list_actions(context: InContext) -> Response:
    """List all actions: the schedule, the last run, the instances that run it and the instances that stand by."""
    async with context.database.connection() as connection:
        found = await admin.find_all(connection, context.database.namespace, context.engine.catalogue)
    return answer(ACTION_LIST, ActionList(found))


@router.get("/{name}", response_model=ActionRecord)
async def get_action(name: str, context: InContext) -> Response:
    """Show one action."""
    async with context.database.connection() as connection:
        return await shown(context, connection, name)


@router.post(
    "/{name}/runs",
    status_code=202,
    response_model=RunRecord,
    responses={
        200: {"model": RunRecord, "description": "The run that an earlier request with this key created"},
        202: {"headers": {"Location": {"description": "The path of the run", "schema": {"type": "string"}}}},
        **problem_responses(409),
    },
    openapi_extra=described(NewRun),
)
async def trigger_run(
    name: str, request: Request, context: InContext, idempotency_key: IdempotencyKey = None
) -> Response:
    """Create a run of an action. A repeated request with the same key returns the same run."""
    order = (await read(request, NEW_RUN)).order(name)
    try:
        triggered = await trigger(context, order, idempotency_key)
    except ActionUnknown:
        raise await action_missing_here(context, name) from None
    set_subject(request, f"{name} run {triggered.id}")
    (run,) = await records(context, [triggered])
    return answer(RUN, run, 202 if triggered.new else 200, Location=f"/runs/{run.id}")


@router.post("/{name}/pause", response_model=ActionRecord)
async def pause_action(name: str, context: InContext) -> Response:
    """Pause an action: its runs are neither scheduled nor claimed. Runs that are triggered meanwhile wait."""
    return await change(context, name, admin.pause)


@router.post("/{name}/resume", response_model=ActionRecord)
async def resume_action(name: str, context: InContext) -> Response:
    """Resume an action: scheduling continues with the next slot from now on, and waiting runs are claimed."""
    return await change(context, name, admin.resume)


async def trigger(context: Context, order: Order, key: str | None) -> Triggered:
    triggers = context.engine.triggers
    # A key in the body identifies the run, and takes precedence over a key of the request.
    if key is None or order.key is not None:
        (done,) = await confirm.trigger(triggers, [order], by="api")
        return done
    keyed = replace(order, key=key, digest=idempotency.digest([order]))

    async def with_lock() -> Triggered:
        async with idempotency.locked_connection(context.database, f"{order.action}:{key}") as connection:
            (done,) = await triggers.trigger([keyed], connection, by="api")
            return done

    return await confirm.repeat_until_known(with_lock)


async def change(context: Context, name: str, how: Callable[[Connection, Namespace, str], Awaitable[None]]) -> Response:
    async with context.database.autocommit() as connection:
        await how(connection, context.database.namespace, name)
        return await shown(context, connection, name)


async def shown(context: Context, connection: Connection, name: str) -> Response:
    return answer(ACTION, await admin.find(connection, context.database.namespace, context.engine.catalogue, name))
