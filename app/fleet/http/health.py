"""Health over HTTP: whether this instance is alive, whether it is ready, and which instances there are.

`/health/live` does no I/O: a database outage is no reason to restart every instance. `/health/ready` is about this
instance alone (`app/fleet/edge/readiness.py`). These two need no API key, and show the status and no internals.
"""

from datetime import datetime
from typing import Literal
from uuid import UUID

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel

from app.fleet.coordination.locks.admin import lock_names
from app.fleet.edge.auth import needs
from app.fleet.edge.context import InContext
from app.fleet.lifecycle import Phase
from app.fleet.role import Role

router = APIRouter(prefix="/health", tags=["health"])


class Alive(BaseModel):
    status: Literal["alive"] = "alive"


class Ready(BaseModel):
    status: Phase | Literal["unavailable"]
    reason: str | None = None


class Instance(BaseModel):
    id: int
    name: str
    run_id: UUID
    role: Role
    state: Literal["starting", "ready", "draining", "gone"]
    hostname: str
    pid: int
    port: int | None
    version: str
    started_at: datetime
    heartbeat_age_ms: int
    leader: bool
    running: int
    concurrency: int
    locks: list[str]
    workspace: str | None
    gone_at: datetime | None
    gone_reason: str | None


class AnomalyView(BaseModel):
    kind: str
    subject: str
    since: datetime
    detail: str


class Instances(BaseModel):
    namespace: str
    self: str | None
    leader: str | None
    instances: list[Instance]
    anomalies: list[AnomalyView]


@router.get("/live")
async def check_alive() -> Alive:
    """Confirm that the process runs. Does no I/O."""
    return Alive()


@router.get("/ready", response_model_exclude_none=True, responses={503: {"model": Ready}})
async def check_ready(context: InContext, response: Response) -> Ready:
    """Report whether this instance should receive requests."""
    lifecycle = context.lifecycle
    if lifecycle.phase is not Phase.READY:
        answer = Ready(status=lifecycle.phase, reason=lifecycle.reason)
    elif obstacle := await context.readiness.obstacle():
        answer = Ready(status="unavailable", reason=obstacle)
    else:
        return Ready(status=Phase.READY)
    response.status_code = 503
    return answer


@router.get("/instances", dependencies=[Depends(needs("read"))])
async def list_instances(context: InContext) -> Instances:
    """List the living instances, the instances that were declared gone within the last minutes, and the anomalies."""
    member = context.member
    rows = await member.instances()
    locks = await lock_names(context.database)
    identity = member.identity
    return Instances(
        namespace=context.settings.namespace,
        self=identity.name if identity else None,
        leader=next((row.name for row in rows if row.leader), None),
        instances=[Instance.model_validate(vars(row) | {"locks": locks.get(row.id, [])}) for row in rows],
        anomalies=[AnomalyView(**vars(anomaly)) for anomaly in await context.coordination.anomalies.find(rows)],
    )
