"""The failed runs in groups: those of one action whose errors are alike."""

from typing import Annotated

from fastapi import Query, Request, Response

from app.fleet.dashboard.frame import cluster_reads
from app.fleet.dashboard.frame.page import kept, new_router, reading, show
from app.fleet.dashboard.frame.session import InViewer
from app.fleet.dashboard.frame.shared_reads import shared
from app.fleet.dashboard.runs import MAX_TEXT
from app.fleet.edge.context import InContext
from app.fleet.engine.actions import admin
from app.fleet.runs.read import alike
from app.fleet.runs.read.alike import ErrorGroup

router = new_router()


@router.get("/errors")
@kept
async def errors_page(
    request: Request, context: InContext, who: InViewer, action: Annotated[str, Query(max_length=MAX_TEXT)] = ""
) -> Response:
    async def read() -> list[ErrorGroup]:
        namespace = context.database.namespace
        async with reading(context) as connection:
            action_id = await admin.id_of(connection, namespace, action) if action else None
            return await alike.find_groups(connection, namespace, action_id)

    groups = await shared(request, ("errors", action), read)
    return show(
        request,
        context,
        "errors.html",
        who,
        title="Errors",
        now=await cluster_reads.now(request),
        groups=groups[: alike.MOST],
        has_more=len(groups) > alike.MOST,
        most=alike.MOST,
        names=[each.name for each in await cluster_reads.all_actions(request)],
        action=action,
    )
