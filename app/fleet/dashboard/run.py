"""One run: its timeline across instances, what it was given, what it returned or raised; cancel and retry."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Path, Query, Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse

from app.fleet.dashboard.actions import Operator, after_change
from app.fleet.dashboard.frame import cluster_reads
from app.fleet.dashboard.frame.forms import PATH
from app.fleet.dashboard.frame.page import kept, new_router, reading, show
from app.fleet.dashboard.frame.session import InViewer, viewer
from app.fleet.dashboard.frame.shared_reads import shared
from app.fleet.dashboard.runs import MAX_ID
from app.fleet.dashboard.timeline import timeline
from app.fleet.edge.auth import stream_slot
from app.fleet.edge.context import InContext
from app.fleet.engine.execute.writer import MAX_EVENTS
from app.fleet.runs import cancel, retry
from app.fleet.runs.attempt_writes import MAX_TRACEBACKS
from app.fleet.runs.effects.events import EventPage, StoredEvent, read_pages
from app.fleet.runs.read import pages, records, relations
from app.fleet.runs.read.pages import ListedRun
from app.fleet.runs.read.records import RunRecord
from app.fleet.runs.read.relations import TriggeredRuns
from app.fleet.runs.read.tracebacks import StoredTraceback, find_tracebacks
from app.fleet.stream.channel import Follower
from app.fleet.stream.relay import CHANGED

# Somebody who has triggered a run watches it.
RUN_AGE = 0.3
# Seconds between two messages that the run has new events, and between two comments that keep the connection open.
SPACING = 0.5
HEARTBEAT = 15.0

NEW_EVENTS = b"data: new\n\n"

router = new_router()

# How many of the runs that it has triggered a page shows.
TRIGGERED_RUNS = 20

RunId = Annotated[int, Path(alias="id", ge=0, le=MAX_ID)]


@dataclass(frozen=True)
class RunReads:
    """What the page shows. `triggerer` is empty if no run triggered it, or that run was deleted."""

    run: RunRecord
    events: EventPage | None
    tracebacks: list[StoredTraceback]
    triggered: TriggeredRuns
    triggerer: list[ListedRun]


@router.get("/runs/{id}")
@kept
async def run_page(run_id: RunId, request: Request, context: InContext, who: InViewer) -> Response:
    # A payload may have personal data, and a traceback shows code: those who only look see neither.
    shows_all = who.may("operate")

    async def read_all() -> RunReads:
        namespace = context.database.namespace
        async with reading(context) as connection:
            run = await records.find(connection, namespace, run_id)
            return RunReads(
                run=run,
                events=(await read_pages(connection, namespace, {run_id: 0})).get(run_id),
                tracebacks=await find_tracebacks(connection, namespace, run_id, limit=MAX_TRACEBACKS)
                if shows_all
                else [],
                triggered=await relations.find_triggered(connection, namespace, run_id, limit=TRIGGERED_RUNS),
                triggerer=await pages.find_listed(connection, namespace, [run.triggered_by])
                if run.triggered_by
                else [],
            )

    seen = await shared(request, ("run", run_id, shows_all), read_all, statements=5, max_age=RUN_AGE)
    now = await cluster_reads.now(request)
    run, read = seen.run, seen.events
    events = read.events if read is not None else []
    left_out = read.total - len(events) if read is not None else 0
    return show(
        request,
        context,
        "run.html",
        who,
        title=f"Run {run_id}",
        now=now,
        run=run,
        events=[each for each in events if each.kind != "state"],
        left_out=left_out,
        timeline=timeline(run, events, now, is_whole=left_out == 0),
        shows_all=shows_all,
        tracebacks=seen.tracebacks,
        triggered=seen.triggered,
        # None if it has been deleted since.
        triggerer=next(iter(seen.triggerer), None),
        trace_url=context.settings.address_of_trace(run.trace_id),
        pretty=pretty,
        follow_after=None if read is None or read.ended else read.total,
    )


async def followed(
    run_id: RunId, context: InContext, after: Annotated[int, Query(ge=0, le=MAX_EVENTS)] = 0
) -> AsyncIterator[Follower[StoredEvent]]:
    async with context.stream.hub.follow(run_id, after) as follower:
        yield follower


# In this order: the number of streams of a viewer is limited.
@router.get("/runs/{id}/events", dependencies=[Depends(viewer), Depends(stream_slot)])
async def follow_run(follower: Annotated[Follower[StoredEvent], Depends(followed)]) -> EventSourceResponse:
    """Tell the page's script when the run has new events: it fetches the page again. All viewers share the reads."""
    return EventSourceResponse(messages(follower), headers={"x-accel-buffering": "no"})


async def messages(follower: Follower[StoredEvent]) -> AsyncIterator[bytes]:
    while not (follower.ended or follower.fell_behind):
        yield NEW_EVENTS if await follower.more(HEARTBEAT) else KEEPALIVE_COMMENT
        await asyncio.sleep(SPACING)
    yield NEW_EVENTS


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
