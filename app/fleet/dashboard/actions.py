"""The actions: a list, and one with its options, a form to trigger it, and its last runs."""

import hashlib
import json
import re
from typing import Annotated

from fastapi import Depends, Request, Response
from fastapi.responses import RedirectResponse

from app.fleet.dashboard.charts import minutes
from app.fleet.dashboard.frame import cluster_reads
from app.fleet.dashboard.frame.forms import PATH, fields
from app.fleet.dashboard.frame.page import kept, new_router, reading, show
from app.fleet.dashboard.frame.session import InViewer, may
from app.fleet.dashboard.frame.shared_reads import shared, shared_reads
from app.fleet.dashboard.payload_form import payload_fields, payload_of
from app.fleet.edge.audit import set_subject
from app.fleet.edge.callers.caller import Caller
from app.fleet.edge.context import Context, InContext
from app.fleet.edge.elsewhere import action_missing_here
from app.fleet.edge.problems import HttpError
from app.fleet.engine.actions import admin
from app.fleet.engine.actions.admin import ActionRecord
from app.fleet.engine.enqueue import confirm
from app.fleet.engine.enqueue.orders import Order
from app.fleet.errors import PayloadInvalid
from app.fleet.runs.read import pages
from app.fleet.runs.read.pages import ListedRun

LAST_RUNS = 20
FORM_KEY = re.compile(r"dashboard-[0-9a-f]{32}")

router = new_router()

Operator = Annotated[Caller, Depends(may("operate"))]


@router.get("/actions")
@kept
async def actions_page(request: Request, context: InContext, who: InViewer) -> Response:
    return show(
        request,
        context,
        "actions.html",
        who,
        title="Actions",
        now=await cluster_reads.now(request),
        actions=await cluster_reads.all_actions(request),
        runnable=await cluster_reads.runnable(request),
        recent=await minutes.recent(request),
    )


@router.get("/actions/{name}")
@kept
async def action_page(name: str, request: Request, context: InContext, who: InViewer) -> Response:
    return await show_action(name, request, context, who)


async def show_action(
    name: str,
    request: Request,
    context: Context,
    who: Caller,
    *,
    status: int = 200,
    given: dict[str, str] | None = None,
    error: str | None = None,
) -> Response:
    """Show an action; after a refused trigger, with what was given and why it was refused."""

    async def read() -> tuple[ActionRecord, list[ListedRun]]:
        namespace = context.database.namespace
        async with reading(context) as connection:
            found = await admin.find(connection, namespace, context.engine.catalogue, name)
            identifier = await admin.id_of(connection, namespace, name)
            return found, await pages.find_page(connection, namespace, action_id=identifier, limit=LAST_RUNS)

    found, last = await shared(request, ("action", name), read, statements=4)
    declared = next((each for each in context.engine.catalogue if each.name == name), None)
    return show(
        request,
        context,
        "action.html",
        who,
        status=status,
        title=name,
        now=await cluster_reads.now(request),
        action=found,
        runs=last,
        runnable=(await cluster_reads.runnable(request)).get(name),
        recent=(await minutes.recent(request)).get(name),
        declared=declared is not None,
        fields=payload_fields(declared, given) if declared else [],
        # Of a form that was refused. Otherwise a new one.
        key=(given or {}).get("key"),
        error=error,
    )


@router.post("/actions/{name}/pause")
async def pause(name: str, request: Request, context: InContext, _: Operator) -> Response:
    async with context.database.autocommit() as connection:
        await admin.pause(connection, context.database.namespace, name)
    return after_change(request, f"{PATH}/actions/{name}")


@router.post("/actions/{name}/resume")
async def resume(name: str, request: Request, context: InContext, _: Operator) -> Response:
    async with context.database.autocommit() as connection:
        await admin.resume(connection, context.database.namespace, name)
    return after_change(request, f"{PATH}/actions/{name}")


@router.post("/actions/{name}/runs")
async def trigger_run(name: str, request: Request, context: InContext, who: Operator) -> Response:
    if name not in context.engine.catalogue:
        raise await action_missing_here(context, name)
    given = await fields(request)
    try:
        payload = payload_of(context.engine.catalogue[name], given)
        order = Order(name, payload, key_of(given))
        (done,) = await confirm.trigger(context.engine.triggers, [order], by="api")
    except PayloadInvalid as error:
        return await show_action(name, request, context, who, status=422, given=given, error=str(error))
    set_subject(request, f"{name} run {done.id}")
    return after_change(request, f"{PATH}/runs/{done.id}")


def key_of(given: dict[str, str]) -> str:
    """Return the key of the run: a form that is sent twice makes one run; if its payload was changed, two."""
    form = given.get("key", "")
    if not FORM_KEY.fullmatch(form):
        raise HttpError("this is not a form of the dashboard: load the page again")
    payload = sorted((name, value) for name, value in given.items() if name.startswith("payload"))
    return f"{form}-{hashlib.sha256(json.dumps(payload).encode()).hexdigest()[:16]}"


def after_change(request: Request, to: str) -> Response:
    """Lead to the page that shows the change."""
    shared_reads(request).forget()
    return RedirectResponse(to, 303)
