"""The held locks, including the locks of singletons, and their release by force."""

from typing import Annotated

from fastapi import Depends, Request, Response

from app.fleet.coordination.locks import admin
from app.fleet.dashboard.actions import after_change
from app.fleet.dashboard.frame import cluster_reads
from app.fleet.dashboard.frame.forms import PATH, fields
from app.fleet.dashboard.frame.page import new_router, show
from app.fleet.dashboard.frame.session import InViewer, Viewer, may
from app.fleet.edge.audit import set_subject
from app.fleet.edge.context import InContext

router = new_router()


@router.get("/locks")
async def locks_page(request: Request, context: InContext, who: InViewer) -> Response:
    locks = await cluster_reads.held_locks(request)
    now = await cluster_reads.now(request)
    return show(request, context, "coordination.html", who, title="Locks", now=now, locks=locks)


@router.post("/locks/release")
async def release(request: Request, context: InContext, who: Annotated[Viewer, Depends(may("admin"))]) -> Response:
    given = await fields(request)
    name, reason = given.get("name", ""), given.get("reason", "")
    by = f"API key {who.name}, on the dashboard" if who.name else "the dashboard, without a key"
    async with context.database.connection() as connection:
        await admin.force_release(connection, context.database.namespace, name, reason=reason, by=by)
    set_subject(request, name)
    return after_change(request, f"{PATH}/locks")
