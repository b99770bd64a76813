"""One run: its timeline across instances, what it was given, what it returned or raised; cancel and retry."""

import json
from typing import Annotated, Any

from fastapi import Path, Request, Response

from app.fleet.dashboard import snapshot
from app.fleet.dashboard.actions import Operator, after_change
from app.fleet.dashboard.frame.forms import PATH
from app.fleet.dashboard.frame.page import new_router, reading, show
from app.fleet.dashboard.frame.session import InViewer
from app.fleet.dashboard.runs import MAX_ID
from app.fleet.dashboard.timeline import timeline
from app.fleet.edge.context import InContext
from app.fleet.runs import cancel, retry
from app.fleet.runs.effects.events import read_pages
from app.fleet.runs.read import pages, records, relations
from app.fleet.stream.relay import CHANGED

router = new_router()

# How many of the runs that it has triggered a page shows.
TRIGGERED_RUNS = 20

RunId = Annotated[int, Path(alias="id", ge=0, le=MAX_ID)]


@router.get("/runs/{id}")
async def run_page(run_id: RunId, request: Request, context: InContext, who: InViewer) -> Response:
    namespace = context.database.namespace
    async with reading(context) as connection:
        run = await records.find(connection, namespace, run_id)
        found = await read_pages(connection, namespace, {run_id: 0})
        triggered = await relations.find_triggered(connection, namespace, run_id, limit=TRIGGERED_RUNS)
        triggerers = await pages.find_listed(connection, namespace, [run.triggered_by]) if run.triggered_by else []
    seen = await snapshot.latest(request)
    read = found.get(run_id)
    events = read.events if read is not None else []
    left_out = read.total - len(events) if read is not None else 0
    return show(
        request,
        context,
        "run.html",
        who,
        title=f"Run {run_id}",
        now=seen.now,
        run=run,
        events=[each for each in events if each.kind != "state"],
        left_out=left_out,
        timeline=timeline(run, events, seen.now, is_whole=left_out == 0),
        triggered=triggered,
        # None if it has been deleted since.
        triggerer=next(iter(triggerers), None),
        trace_url=context.settings.address_of_trace(run.trace_id),
        # A payload may have personal data: those who only look do not see it.
        shows_payload=who.may("operate"),
        pretty=pretty,
    )


@router.post("/runs/{id}/cancel")
async def cancel_run(run_id: RunId, request: Request, context: InContext, _: Operator) -> Response:
    async with context.database.autocommit() as connection:
        await cancel.cancel_run(connection, context.database.namespace, run_id)
    context.stream.relay.notify(CHANGED, [run_id])
    return after_change(request, f"{PATH}/runs/{run_id}")


@router.post("/runs/{id}/retry")
async def retry_run(run_id: RunId, request: Request, context: InContext, _: Operator) -> Response:
    async with context.database.autocommit() as connection:
        await retry.retry_run(connection, context.database.namespace, run_id)
    return after_change(request, f"{PATH}/runs/{run_id}")


def pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
