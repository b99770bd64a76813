"""Routes for tests, among the routes of the service. Run as a module, it is the command line.

They represent routes that users write: slow handlers, streams, handlers that block the loop, validated bodies.
"""

import asyncio
import importlib
import logging
import os
import resource
import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Body, HTTPException, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel
from sqlalchemy import text

from app import routes
from app.fleet import InSession, breaker, limit, lock, once
from app.fleet.cli import main
from app.fleet.edge import middleware
from app.fleet.edge.context import InContext

router = APIRouter(prefix="/trial")
log = logging.getLogger("trial")
# Short, so that tests need not wait for the default.
middleware.STALL_TIMEOUT = float(os.environ.get("TRIAL_STALLED", middleware.STALL_TIMEOUT))
if files := os.environ.get("TRIAL_FILES"):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), int(files)))


class Parcel(BaseModel):
    weight: int
    label: str = ""


@router.get("/slow")
async def slow(seconds: float) -> dict[str, float]:
    if seconds >= 1:
        log.warning("trial.began")
    await asyncio.sleep(seconds)
    return {"slept": seconds}


@router.get("/client")
async def show_client(request: Request) -> list[str | None]:
    return [request.client.host if request.client else None, request.state.proxy, request.url.scheme]


@router.get("/block")
async def block(seconds: float) -> dict[str, float]:
    log.warning("trial.blocks")
    time.sleep(seconds)  # noqa: ASYNC251 — the mistake this route is for
    return {"blocked": seconds}


@router.get("/stuck")
def stuck() -> None:
    """Never return: the thread that runs this can be neither cancelled nor ended."""
    while True:
        time.sleep(3600)


@router.get("/events", response_class=EventSourceResponse)
async def events() -> AsyncIterator[dict[str, int]]:
    number = 0
    while True:
        yield {"n": number}
        number += 1
        await asyncio.sleep(0.05)


@router.get("/download")
async def download(seconds: float) -> StreamingResponse:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(int(seconds * 10)):
            yield b"x" * 100
            await asyncio.sleep(0.1)

    return StreamingResponse(chunks(), media_type="application/octet-stream")


@router.get("/large")
async def large(megabytes: int, how: str) -> Response:
    """Answer with a large body, at once or in pieces."""
    if how == "whole":
        return Response(b"x" * (megabytes << 20))

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(megabytes * 16):
            yield b"x" * 65536

    return StreamingResponse(chunks())


@router.post("/parcels")
async def parcels(parcel: Parcel) -> Parcel:
    return parcel


@router.get("/parcels/{number}")
async def numbered_parcel(number: int) -> int:
    return number


@router.post("/raw")
async def raw(body: Annotated[bytes, Body(media_type="application/octet-stream")]) -> int:
    return len(body)


@router.get("/limited")
async def limited() -> None:
    await limit("trial", "1/h", wait=0)


@router.get("/guarded")
async def guarded(fails: bool) -> None:
    async with breaker("trial", failures=1, rest="1h"):
        if fails:
            raise HTTPException(502, "the harbour office does not answer")


@router.post("/once/{key}")
async def process_once(key: str) -> str:
    async with once("route", key) as fresh:
        return fresh.state


@router.get("/fail")
async def fail() -> None:
    raise RuntimeError("the password is hunter2")


@router.get("/database")
async def database(context: InContext) -> int:
    async with context.database.session() as session:
        return int((await session.execute(text("SELECT 42"))).scalar_one())


@router.post("/holds-a-session")
async def hold_a_session(request: Request, session: InSession) -> None:
    """Return the backend of this request's transaction, and use the transaction again after that backend has ended."""
    pid = (await session.execute(text("SELECT pg_backend_pid()"))).scalar_one()
    request.app.state.held.put_nowait(pid)
    # Until the test ends the backend, or disconnects.
    await session.execute(text("SELECT pg_sleep(60)"))


@router.post("/holds-a-session-and-takes/{what}")
async def hold_a_session_and_take(what: str, session: InSession) -> None:
    """Use the mechanisms of the fleet inside the transaction of the request."""
    await session.execute(text("SELECT 1"))
    # As long as a call to another service takes, so that all requests hold their sessions at the same time.
    await asyncio.sleep(0.1)
    if what == "lock":
        async with lock(f"trial-{secrets.token_hex(4)}"):
            pass
    elif what == "limit":
        await limit("trial-many", "10000/s", wait=2)
    elif what == "breaker":
        async with breaker("trial-many"):
            pass
    else:
        async with once("trial-many", secrets.token_hex(4)):
            pass
    await session.execute(text("SELECT 2"))


@router.get("/tidy")
async def tidy(context: InContext) -> None:
    """Take long; when cancelled, need half a second and the database for the cleanup."""
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(0.5)
        async with context.database.session() as session:
            await session.execute(text("CREATE TABLE public.tidied ()"))


routes.router.include_router(router)
# What `app/startup.py` of a service declares.
if os.environ.get("TRIAL_STARTUP"):
    importlib.import_module("tests.support.trial_startup")

if __name__ == "__main__":
    main()
