"""Error handlers: every error that a route raises becomes a problem. There is one handler for each family of errors.

They serve a service's own routes in the same way. An error that a handler cannot explain is logged as `request.failed`
and answered with `internal`.
"""

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import psycopg
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from psycopg_pool import PoolTimeout
from psycopg_pool import TooManyRequests as PoolFull
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException

from app.fleet.db.pool.pool import DatabaseAway
from app.fleet.engine.enqueue.confirm import broke_off, is_away
from app.fleet.errors import (
    ActionUnknown,
    AlreadyActive,
    BreakerError,
    BreakerInvalid,
    BreakerOpen,
    EngineError,
    EventUnknown,
    FeedOff,
    KeyInFlight,
    KeyReused,
    LimitError,
    LimitInvalid,
    LimitReached,
    LockError,
    LockInvalid,
    LockTaken,
    LockUnknown,
    OutcomeUnknown,
    PayloadInvalid,
    RunNotReady,
    RunUnknown,
)
from app.fleet.http.edge.problems import (
    BY_STATUS,
    KINDS,
    SAFE_METHODS,
    HttpError,
    Kind,
    Problem,
    field_of,
    listed,
    problem,
)
from app.fleet.telemetry.logs import events, request_id

log = events(__name__)


def install(app: FastAPI) -> None:
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)


async def on_http_error(request: Request, error: Exception) -> Problem:
    assert isinstance(error, HttpError)
    return problem(request, KINDS[error.slug], error.detail, headers=error.headers, **error.extra)


async def on_http_exception(request: Request, error: Exception) -> Problem:
    """Handle the errors of Starlette and FastAPI, and the `HTTPException`s of a service's own routes."""
    assert isinstance(error, HTTPException)
    fallback = KINDS["internal"] if error.status_code >= 500 else KINDS["bad-request"]
    kind = BY_STATUS.get(error.status_code, fallback)
    phrase = HTTPStatus(error.status_code).phrase
    detail = kind.remedy if error.detail == phrase else error.detail
    if kind.status != error.status_code:
        kind = Kind(kind.slug, error.status_code, phrase, kind.remedy)
    return problem(request, kind, str(detail), headers=error.headers)


async def on_invalid(request: Request, error: Exception) -> Problem:
    """Name each invalid field and what is wrong with it. Values are never repeated: they may contain secrets."""
    assert isinstance(error, RequestValidationError)
    parts = error.errors()
    content_type = request.headers.get("content-type", "")
    whole_body = [part for part in parts if tuple(part["loc"]) == ("body",)]
    if whole_body and content_type and "json" not in content_type:
        detail = f"this path accepts JSON, not {content_type.split(';')[0]}: send `Content-Type: application/json`"
        return problem(request, KINDS["unsupported-media-type"], detail)
    errors = [field_error(part) for part in parts]
    return problem(request, KINDS["invalid"], listed(errors), errors=errors)


def field_error(part: Mapping[str, Any]) -> dict[str, str]:
    if part.get("type") == "json_invalid" and len(part["loc"]) == 2:
        # The framework gives the position in the body as if it were a field.
        return {"field": "body", "message": f"{part['msg']} at character {part['loc'][1]}"}
    return {"field": field_of(part["loc"]), "message": part["msg"]}


# Any other EngineError is `invalid`.
ENGINE_PROBLEMS: dict[type[EngineError], str] = {
    ActionUnknown: "not-found",
    RunUnknown: "not-found",
    EventUnknown: "bad-request",
    FeedOff: "not-found",
    AlreadyActive: "conflict",
    RunNotReady: "conflict",
    KeyInFlight: "key-in-flight",
    KeyReused: "key-reused",
    PayloadInvalid: "invalid",
}


async def on_engine_error(request: Request, error: Exception) -> Problem:
    """Handle what the engine refuses, to a route of the fleet or to `trigger` in a route of the service."""
    assert isinstance(error, EngineError)
    slug = next((ENGINE_PROBLEMS[each] for each in type(error).__mro__ if each in ENGINE_PROBLEMS), "invalid")
    extra: dict[str, Any] = {}
    if slug == "invalid":
        extra["errors"] = error.errors if isinstance(error, PayloadInvalid) else []
    if isinstance(error, AlreadyActive):
        extra["run"] = error.run_id
    headers = {"Retry-After": "1"} if slug == "key-in-flight" else None
    return problem(request, KINDS[slug], str(error), headers=headers, **extra)


async def on_lock_error(request: Request, error: Exception) -> Problem:
    """Handle a lock that is held, invalid or unknown. A lost lock is unexpected."""
    assert isinstance(error, LockError)
    if isinstance(error, LockUnknown):
        return problem(request, KINDS["not-found"], str(error))
    if isinstance(error, LockTaken):
        return problem(request, KINDS["locked"], str(error), headers={"Retry-After": "1"})
    if isinstance(error, LockInvalid):
        return problem(request, KINDS["invalid"], str(error), errors=[])
    log.error("request.failed", error=error, method=request.method, path=request.url.path)
    return await on_unexpected(request, error)


async def on_limit_error(request: Request, error: Exception) -> Problem:
    """Handle a limit without a permit and an open breaker, which the route did not catch."""
    assert isinstance(error, LimitError | BreakerError)
    if isinstance(error, LimitInvalid | BreakerInvalid):
        return problem(request, KINDS["invalid"], str(error), errors=[])
    assert isinstance(error, LimitReached | BreakerOpen)
    slug = "too-many-requests" if isinstance(error, LimitReached) else "upstream-unavailable"
    retry_after = max(1, math.ceil(error.retry_after))
    return problem(request, KINDS[slug], str(error), headers={"Retry-After": str(retry_after)})


async def on_database_error(request: Request, error: Exception) -> Problem:
    """Answer an outage with 503, for the client to try again; any other database error is unexpected.

    If the connection broke while the request changed something, it is unknown whether the change was committed.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, PoolTimeout | PoolFull):
        detail = "all database connections of this instance are in use: try again shortly, or at another instance"
        return problem(request, KINDS["unavailable"], detail, headers={"Retry-After": "1"})
    connection_broke = cause is not None and broke_off(cause)
    if connection_broke and request.method not in SAFE_METHODS:
        detail = (
            "the connection to the database broke before it confirmed the change: check whether the change was made "
            "before you send the request again"
        )
        return problem(request, KINDS["outcome-unknown"], detail)
    if connection_broke or (cause is not None and is_away(cause)):
        detail = "the database does not answer at the moment: try again shortly"
        return problem(request, KINDS["unavailable"], detail, headers={"Retry-After": "2"})
    log.error("request.failed", error=error, method=request.method, path=request.url.path)
    return await on_unexpected(request, error)


async def on_outcome_unknown(request: Request, error: Exception) -> Problem:
    return problem(request, KINDS["outcome-unknown"], str(error))


async def on_unexpected(request: Request, _: Exception) -> Problem:
    detail = f"the request failed unexpectedly: the error is in the service's log, under request id {request_id.get()}"
    return problem(request, KINDS["internal"], detail)


HANDLERS = {
    HttpError: on_http_error,
    HTTPException: on_http_exception,
    RequestValidationError: on_invalid,
    EngineError: on_engine_error,
    LockError: on_lock_error,
    LimitError: on_limit_error,
    BreakerError: on_limit_error,
    DatabaseAway: on_database_error,
    OutcomeUnknown: on_outcome_unknown,
    psycopg.Error: on_database_error,
    DBAPIError: on_database_error,
    Exception: on_unexpected,
}
