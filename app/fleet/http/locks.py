"""Locks over HTTP: list the held locks, and release one by force (`coordination/locks/admin.py`)."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import TypeAdapter

from app.fleet.coordination.locks import admin
from app.fleet.coordination.locks.admin import LockRecord
from app.fleet.edge.auth import name_of, needs
from app.fleet.edge.context import InContext
from app.fleet.edge.openapi import problem_responses
from app.fleet.http.bodies import answer
from app.fleet.http.fields import LockName, ReleaseReason

router = APIRouter(prefix="/locks", tags=["locks"], dependencies=[Depends(needs())])


@dataclass(frozen=True)
class LockList:
    items: list[LockRecord]


LOCK = TypeAdapter(LockRecord)
LOCK_LIST = TypeAdapter(LockList)


@router.get("", response_model=LockList)
async def list_locks(context: InContext) -> Response:
    """List the held locks: the holder, since when, the fencing token, and the number of waiters."""
    async with context.database.connection() as connection:
        return answer(LOCK_LIST, LockList(await admin.list_locks(connection, context.database.namespace)))


@router.delete(
    "/{name:path}", response_model=LockRecord, dependencies=[Depends(needs("admin"))], responses=problem_responses(409)
)
async def release_lock(
    name: Annotated[LockName, Path(description="The name of the lock; it may contain slashes")],
    reason: Annotated[ReleaseReason, Query(description="The reason, which is stored")],
    context: InContext,
    request: Request,
) -> Response:
    """Release a lock by force. Later writes of its holder are rejected. The caller and the reason are stored."""
    by = name_of(context, request.state.caller)
    async with context.database.connection() as connection:
        record = await admin.force_release(connection, context.database.namespace, name, reason=reason, by=by)
    return answer(LOCK, record)
