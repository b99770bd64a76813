"""Requests that another instance may serve: at a worker, all paths but a few; elsewhere, an action of other code."""

from fastapi import APIRouter

from app.fleet.edge.context import Context
from app.fleet.edge.problems import Unavailable
from app.fleet.engine.actions import admin
from app.fleet.errors import ActionUnknown, FleetError

router = APIRouter(include_in_schema=False)

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@router.api_route("/{path:path}", methods=METHODS)
async def elsewhere() -> None:
    """Refuse the request: it can be served, but by another instance."""
    raise Unavailable(
        "this instance has the role worker, which serves only /health and /metrics: send the request to an instance "
        "of role web or all"
    )


async def action_missing_here(context: Context, name: str) -> FleetError:
    """Return the error for an action that is not in this instance's code: 404 only if no release ever had it."""
    async with context.database.connection() as connection:
        try:
            found = await admin.find(connection, context.database.namespace, context.engine.catalogue, name)
        except ActionUnknown as unknown:
            return unknown
    if found.state == "vanished":
        who = "and neither does any other living instance: deploy a release that has it"
    else:
        others = f", such as {', '.join(found.standby[:3])}" if found.standby else ""
        who = f"but other living instances have it{others}: send the request again shortly"
    return Unavailable(
        f"this instance does not have the action {name!r} in its code, so it cannot check the payload, {who}",
        retry_after=2 if found.state != "vanished" else 30,
    )
