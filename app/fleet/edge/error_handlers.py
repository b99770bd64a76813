"""Error handlers: every error that a route raises becomes a problem. `PROBLEMS` is the table for errors of the fleet.

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

from app.fleet import errors
from app.fleet.db.pool.pool import DatabaseAway
from app.fleet.edge.problems import (
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
from app.fleet.engine.enqueue.confirm import broke_off, is_away
from app.fleet.telemetry.logs import event_log, request_id

log = event_log(__name__)


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
    fields = [field_error(part) for part in parts]
    return problem(request, KINDS["invalid"], listed(fields), errors=fields)


def field_error(part: Mapping[str, Any]) -> dict[str, str]:
    if part.get("type") == "json_invalid" and len(part["loc"]) == 2:
        # The framework gives the position in the body as if it were a field.
        return {"field": "body", "message": f"{part['msg']} at character {part['loc'][1]}"}
    return {"field": field_of(part["loc"]), "message": part["msg"]}


# The kind of problem for an error, by its class or nearest base class. Other errors of locks are unexpected.
PROBLEMS: dict[type, str] = {
    errors.EngineError: "invalid",
    errors.ActionUnknown: "not-found",
    errors.RunUnknown: "not-found",
    errors.EventUnknown: "bad-request",
    errors.FeedOff: "not-found",
    errors.AlreadyActive: "conflict",
    errors.RunNotReady: "conflict",
    errors.KeyInFlight: "key-in-flight",
    errors.KeyReused: "key-reused",
    errors.LockUnknown: "not-found",
    errors.LockTaken: "locked",
    errors.LockInvalid: "invalid",
    errors.LimitInvalid: "invalid",
    errors.LimitReached: "too-many-requests",
    errors.BreakerInvalid: "invalid",
    errors.BreakerOpen: "upstream-unavailable",
    errors.OutcomeUnknown: "outcome-unknown",
}


async def on_fleet_error(request: Request, error: Exception) -> Problem:
    """Handle what the fleet refuses, to its own routes or to code in a route of the service."""
    slug = next((PROBLEMS[each] for each in type(error).__mro__ if each in PROBLEMS), None)
    if slug is None:
        return await on_defect(request, error)
    extra: dict[str, Any] = {}
    headers = {"Retry-After": "1"} if slug in {"key-in-flight", "locked"} else {}
    if slug == "invalid":
        extra["errors"] = error.errors if isinstance(error, errors.PayloadInvalid) else []
    if isinstance(error, errors.AlreadyActive):
        extra["run"] = error.run_id
    if isinstance(error, errors.LimitReached | errors.BreakerOpen):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return problem(request, KINDS[slug], str(error), headers=headers, **extra)


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
    return await on_defect(request, error)


async def on_defect(request: Request, error: Exception) -> Problem:
    log.error("request.failed", error=error, method=request.method, path=request.url.path)
    return await on_unexpected(request, error)


async def on_unexpected(request: Request, _: Exception) -> Problem:
    detail = f"the request failed unexpectedly: the error is in the service's log, under request id {request_id.get()}"
    return problem(request, KINDS["internal"], detail)


HANDLERS = {
    HttpError: on_http_error,
    HTTPException: on_http_exception,
    RequestValidationError: on_invalid,
    errors.EngineError: on_fleet_error,
    errors.LockError: on_fleet_error,
    errors.LimitError: on_fleet_error,
    errors.BreakerError: on_fleet_error,
    DatabaseAway: on_database_error,
    errors.OutcomeUnknown: on_fleet_error,
    psycopg.Error: on_database_error,
    DBAPIError: on_database_error,
    Exception: on_unexpected,
}
