"""Coordination: locks and singletons, limits, breakers and pending `once` keys; release a lock, close a breaker.

The two changes need different scopes. A lock is taken from a holder that may be acting on it: `admin`. Closing a
breaker takes nothing from an instance, and it opens again if the other system still fails: `operate`, as for a retry.

Each list ends after `SHOWN` rows. The pending keys are read apart from the rest: until a vacuum, their index has an
entry for each key that was pending since (`db/schema/once.py`). If that read takes too long, the page says so, and a
lock can be released all the same.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import psycopg
from fastapi import Depends, Request, Response

from app.fleet.coordination import breaker_admin, rate_use
from app.fleet.coordination.breaker_admin import BreakerRecord
from app.fleet.coordination.locks import admin
from app.fleet.coordination.locks.admin import LockRecord
from app.fleet.coordination.rate_use import RateUse
from app.fleet.dashboard.actions import Operator, after_change
from app.fleet.dashboard.frame import cluster_reads
from app.fleet.dashboard.frame.forms import PATH, fields
from app.fleet.dashboard.frame.page import kept, new_router, reading, show
from app.fleet.dashboard.frame.session import InViewer, may
from app.fleet.dashboard.frame.shared_reads import shared
from app.fleet.edge.audit import set_subject
from app.fleet.edge.auth import name_of
from app.fleet.edge.callers.caller import Caller
from app.fleet.edge.context import Context, InContext
from app.fleet.engine.actions import limited
from app.fleet.engine.actions.limited import LimitedAction
from app.fleet.engine.once import pending
from app.fleet.engine.once.pending import Pending

SHOWN = 200
SHOWN_KEYS = 50

router = new_router()


@dataclass(frozen=True)
class CoordinationState:
    """Each list has one entry more than is shown, if there are more."""

    locks: Sequence[LockRecord]
    limits: Sequence[RateUse]
    actions: Sequence[LimitedAction]
    breakers: Sequence[BreakerRecord]


@router.get("/coordination")
@kept
async def coordination_page(request: Request, context: InContext, who: InViewer) -> Response:
    async def read() -> CoordinationState:
        namespace, limit = context.database.namespace, SHOWN + 1
        async with reading(context) as connection:
            return CoordinationState(
                await admin.list_locks(connection, namespace, limit=limit),
                await rate_use.read_limits(connection, namespace, limit=limit),
                await limited.read_limited(connection, namespace, limit=limit),
                await breaker_admin.list_breakers(connection, namespace, limit=limit),
            )

    async def read_pending() -> Pending:
        async with reading(context) as connection:
            return await pending.read_pending(connection, context.database.namespace, limit=SHOWN_KEYS)

    seen = await shared(request, "coordination", read, statements=4)
    keys: Pending | None = None
    with suppress(TimeoutError, psycopg.errors.QueryCanceled):
        keys = await shared(request, "once keys", read_pending, statements=2, max_age=cluster_reads.SLOW_AGE)
    return show(
        request,
        context,
        "coordination.html",
        who,
        title="Coordination",
        now=await cluster_reads.now(request),
        seen=seen,
        pending=keys,
        most=SHOWN,
        # A key may have personal data, as a payload may: those who only look do not see it.
        shows_keys=who.may("operate"),
    )


@router.post("/coordination/locks/release")
async def release(request: Request, context: InContext, who: Annotated[Caller, Depends(may("admin"))]) -> Response:
    given = await fields(request)
    name, reason = given.get("name", ""), given.get("reason", "")
    async with context.database.connection() as connection:
        await admin.force_release(connection, context.database.namespace, name, reason=reason, by=by(context, who))
    return changed(request, name)


@router.post("/coordination/breakers/close")
async def close(request: Request, context: InContext, who: Operator) -> Response:
    name = (await fields(request)).get("name", "")
    async with context.database.autocommit() as connection:
        await breaker_admin.close(connection, context.database.namespace, name, by=by(context, who))
    return changed(request, name)


def by(context: Context, who: Caller) -> str:
    return f"{name_of(context, who)}, on the dashboard" if who.name else "the dashboard, without a key"


def changed(request: Request, subject: str) -> Response:
    set_subject(request, subject)
    return after_change(request, f"{PATH}/coordination")
