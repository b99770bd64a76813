"""The runs: a list by action and state, and one run with its timeline across instances."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Path, Query, Request, Response

from app.fleet.dashboard import snapshot
from app.fleet.dashboard.actions import Operator, after_change
from app.fleet.dashboard.forms import PATH
from app.fleet.dashboard.page import new_router, reading, show
from app.fleet.dashboard.session import InViewer
from app.fleet.edge.context import InContext
from app.fleet.edge.problems import HttpError
from app.fleet.engine.actions import admin
from app.fleet.runs import cancel, retry
from app.fleet.runs.effects.events import StoredEvent, read_pages
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read import pages, records
from app.fleet.runs.read.records import RunRecord
from app.fleet.stream.relay import CHANGED

PAGE = 50
# The width of a timeline, in its own units; its smallest bar.
WIDTH, NARROWEST = 1000.0, 2.0
WAITING = "waiting"

router = new_router()

MAX_ID = 2**63 - 1
RunId = Annotated[int, Path(alias="id", ge=0, le=MAX_ID)]


@dataclass(frozen=True)
class Bar:
    """A period of a run: it waits, or an instance executes an attempt."""

    lane: int
    kind: str
    x: float
    width: float
    title: str


@dataclass(frozen=True)
class Timeline:
    # `waiting`, and the instances in the order in which they executed it.
    lanes: list[str]
    bars: list[Bar]
    began: datetime
    ended: datetime


@router.get("/runs")
async def runs_page(
    request: Request,
    context: InContext,
    who: InViewer,
    action: Annotated[str, Query()] = "",
    state: Annotated[str, Query()] = "",
    before: Annotated[int | None, Query(ge=0, le=MAX_ID)] = None,
) -> Response:
    if state and state not in list(RunState):
        raise HttpError(f"there is no such state: a run is {', '.join(RunState)}")
    namespace = context.database.namespace
    async with reading(context) as connection:
        action_id = await admin.id_of(connection, namespace, action) if action else None
        found = await pages.find_page(
            connection, namespace, action_id=action_id, states=[state] if state else [], limit=PAGE + 1, before=before
        )
    seen = await snapshot.latest(request)
    more = None
    if len(found) > PAGE:
        filters = {"action": action, "state": state, "before": found[PAGE - 1].id}
        more = urlencode({name: value for name, value in filters.items() if value})
    return show(
        request,
        context,
        "runs.html",
        who,
        title="Runs",
        now=seen.now,
        runs=found[:PAGE],
        names=[each.name for each in seen.actions],
        states=list(RunState),
        action=action,
        state=state,
        first=before is None,
        more=more,
    )


@router.get("/runs/{id}")
async def run_page(run_id: RunId, request: Request, context: InContext, who: InViewer) -> Response:
    namespace = context.database.namespace
    async with reading(context) as connection:
        run = await records.find(connection, namespace, run_id)
        found = await read_pages(connection, namespace, {run_id: 0})
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


# -- the timeline -----------------------------------------------------------------------------------------------------


def timeline(run: RunRecord, events: Sequence[StoredEvent], now: datetime, *, is_whole: bool = True) -> Timeline:
    """Return the periods of the run, from the events of its changes of state.

    If these are only its first events (not `is_whole`), the timeline ends with the last of them.
    """
    changes = [(each.at, json.loads(each.text or "{}")) for each in events if each.kind == "state"]
    ended = run.finished_at or max([now, *(at for at, _ in changes)]) if is_whole else events[-1].at
    began = changes[0][0] if changes else run.created_at
    scale = WIDTH / max((ended - began).total_seconds(), 0.001)
    lanes, bars = [WAITING], []
    for (at, change), (until, after) in zip(changes, [*changes[1:], (ended, {})], strict=True):
        if change["state"] not in {RunState.PENDING, RunState.RUNNING}:
            continue
        is_running = change["state"] == RunState.RUNNING
        lane = change["instance"] if is_running else WAITING
        if lane not in lanes:
            lanes.append(lane)
        outcome = after.get("state", run.state if is_whole else "what follows")
        what = f"attempt {change['attempt']} on {lane}" if is_running else WAITING
        left = (at - began).total_seconds() * scale
        width = max(NARROWEST, (until - at).total_seconds() * scale)
        kind = WAITING if not is_running else str(outcome) if after or is_whole else str(RunState.RUNNING)
        bars.append(Bar(lanes.index(lane), kind, round(left, 1), round(width, 1), titled(what, outcome, until - at)))
    return Timeline(lanes, bars, began, ended)


def titled(what: str, outcome: str, duration: timedelta) -> str:
    return f"{what}, {duration.total_seconds():.3f} s, then {outcome}"
