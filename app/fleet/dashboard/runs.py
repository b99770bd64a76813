"""The runs: a list by action and state."""

from typing import Annotated
from urllib.parse import urlencode

from fastapi import Query, Request, Response

from app.fleet.dashboard import snapshot
from app.fleet.dashboard.frame.page import new_router, reading, show
from app.fleet.dashboard.frame.session import InViewer
from app.fleet.edge.context import InContext
from app.fleet.edge.problems import HttpError
from app.fleet.engine.actions import admin
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read import pages

PAGE = 50
MAX_ID = 2**63 - 1

router = new_router()


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
