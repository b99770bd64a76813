"""Every error at the edge has one shape: `application/problem+json` (RFC 9457), with a `type` that leads somewhere.

    {"type": "/problems/unauthorized", "title": …, "status": 401, "detail": "what to do", "instance": "/actions",
     "request_id": …}

`type` is a path of this very service: `GET` it for the page that explains it. `detail` says what to do. Nothing of the
inside goes out: an unexpected error says only under which request id the log has it.

A problem is bounded, whatever was sent: a field's name is repeated, cut to `FIELD_MOST` characters, and `errors` has at
most `ERRORS_MOST` entries. A field is named by its path, with dots: in the body by that alone (`priority`,
`runs.3.payload.weight`), elsewhere after the place where it stands (`query.limit`, `header.Idempotency-Key`).

OpenAPI has the shape as the one schema `Problem`, and every status that a route can answer with (`declare`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import psycopg
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from psycopg_pool import PoolTimeout
from psycopg_pool import TooManyRequests as PoolFull
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException

from app.fleet.db.pool import DatabaseAway
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
    FleetError,
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
from app.fleet.telemetry.logs import events, request_id
from app.fleet.telemetry.redaction import redact

log = events(__name__)

# Methods that change nothing.
SAFE = {"GET", "HEAD", "OPTIONS", "TRACE"}
ERRORS_MOST = 20
FIELD_MOST = 100
MESSAGE_MOST = 300
DETAIL_MOST = 1000
PATH_MOST = 500


@dataclass(frozen=True)
class Kind:
    """One kind of problem: a page of the documentation, and what a client meets."""

    slug: str
    status: int
    title: str
    remedy: str


KINDS = {
    kind.slug: kind
    for kind in (
        Kind("bad-request", 400, "The request cannot be understood", "Correct it as `detail` says; do not repeat it."),
        Kind(
            "unauthorized",
            401,
            "No valid API key",
            "Send a key as `Authorization: Bearer …` or `X-API-Key: …`. An operator makes one with `flotilla key`.",
        ),
        Kind(
            "forbidden",
            403,
            "The API key may not do this",
            "Use a key with the scope that `detail` names; scopes are read, operate and admin, each with the former.",
        ),
        Kind("not-found", 404, "There is nothing here", "Check the path and the id in it."),
        Kind(
            "method-not-allowed", 405, "This path does not take that method", "The `Allow` header lists what it takes."
        ),
        Kind("conflict", 409, "It conflicts with what is there", "Look at what `detail` names, then decide."),
        Kind(
            "locked",
            409,
            "Somebody else holds the lock for this",
            "`detail` says who. Send it again after the seconds in `Retry-After`.",
        ),
        Kind(
            "key-in-flight",
            409,
            "A request with this key is being worked on",
            "Send it again, as it is, after the seconds in `Retry-After`: it has the answer of the first one then.",
        ),
        Kind(
            "payload-too-large",
            413,
            "The body is too large",
            "Send less at once. The limit is `FLOTILLA_MAX_BODY` bytes; nothing of the request was kept.",
        ),
        Kind(
            "unsupported-media-type",
            415,
            "The body is of a type this path does not read",
            "Send JSON, with `Content-Type: application/json`.",
        ),
        Kind(
            "invalid",
            422,
            "The request does not fit",
            "`errors` names each field and what is wrong with it. Nothing was written.",
        ),
        Kind(
            "key-reused",
            422,
            "This key came with another request before",
            "A new request needs a new `Idempotency-Key`; the same request, sent again, must not change. Nothing was "
            "written.",
        ),
        Kind("too-many-requests", 429, "Too many requests", "Wait for the seconds in `Retry-After`."),
        Kind(
            "internal",
            500,
            "Something went wrong here",
            "Search the log for `request_id`. Whether anything was written depends on where it failed; repeat only "
            "what is safe to repeat.",
        ),
        Kind(
            "outcome-unknown",
            500,
            "It is not known whether this took effect",
            "The connection to the database broke before it confirmed the change. Look whether the change is there "
            "before you repeat the request. A request with an `Idempotency-Key` can be repeated as it is.",
        ),
        Kind(
            "unavailable",
            503,
            "Not now",
            "Repeat it after the seconds in `Retry-After`, at this or another instance: the database is away or every "
            "connection is in use, or this instance is starting or draining, or its release does not have it yet.",
        ),
        Kind(
            "upstream-unavailable",
            503,
            "Something that is needed for this does not work",
            "Repeat it after the seconds in `Retry-After`. It has failed too often, and is left alone for a while.",
        ),
    )
}
# The first of a status is the general one.
BY_STATUS = {kind.status: kind for kind in reversed(KINDS.values())}


class HttpError(FleetError, HTTPException):
    """Refused at the edge, with a kind and what to do about it.

    An `HTTPException` too, because the framework passes those through where it would turn another into a 400.
    """

    slug = "bad-request"

    def __init__(self, detail: str, *, headers: Mapping[str, str] | None = None, **extra: Any) -> None:
        HTTPException.__init__(self, KINDS[self.slug].status, detail, dict(headers or {}))
        self.extra = extra

    def __str__(self) -> str:
        return self.detail


class Unauthorized(HttpError):
    slug = "unauthorized"


class Forbidden(HttpError):
    slug = "forbidden"


class NotFound(HttpError):
    slug = "not-found"


class Conflict(HttpError):
    slug = "conflict"


class TooManyRequests(HttpError):
    slug = "too-many-requests"

    def __init__(self, detail: str, *, retry_after: float) -> None:
        super().__init__(detail, headers={"Retry-After": str(max(1, math.ceil(retry_after)))})


class PayloadTooLarge(HttpError):
    slug = "payload-too-large"


class Unavailable(HttpError):
    slug = "unavailable"

    def __init__(self, detail: str, *, retry_after: int = 1) -> None:
        super().__init__(detail, headers={"Retry-After": str(retry_after)})


class Problem(JSONResponse):
    media_type = "application/problem+json"


def problem(
    request: Request,
    kind: Kind,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    errors: Sequence[Mapping[str, Any]] | None = None,
    **extra: Any,
) -> Problem:
    body = {
        "type": f"/problems/{kind.slug}",
        "title": kind.title,
        "status": kind.status,
        "detail": cut(redact(detail), DETAIL_MOST),
        "instance": cut(request.url.path, PATH_MOST),
        "request_id": request_id.get(),
        **extra,
    }
    if errors is not None:
        body["errors"] = [
            {"field": cut(each["field"], FIELD_MOST), "message": cut(redact(each["message"]), MESSAGE_MOST)}
            for each in errors[:ERRORS_MOST]
        ]
        if len(errors) > ERRORS_MOST:
            body["errors_left_out"] = len(errors) - ERRORS_MOST
    return Problem(body, status_code=kind.status, headers=dict(headers or {}))


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def listed(errors: Sequence[Mapping[str, Any]]) -> str:
    """Write the first errors as one text."""
    first = "; ".join(f"{cut(each['field'], FIELD_MOST)}: {each['message']}" for each in errors[:3])
    return first + (f"; and {len(errors) - 3} more" if len(errors) > 3 else "")


def field_of(location: Sequence[str | int]) -> str:
    """Name a field by its path; in the body without the word `body` before it."""
    first, *rest = location or ("body",)
    return ".".join(str(step) for step in (rest if rest and first == "body" else location or ("body",)))


# -- one handler for each root of a tree of errors --------------------------------------------------------------------


async def on_http_error(request: Request, error: Exception) -> Problem:
    assert isinstance(error, HttpError)
    return problem(request, KINDS[error.slug], error.detail, headers=error.headers, **error.extra)


async def on_http_exception(request: Request, error: Exception) -> Problem:
    """Give Starlette's and FastAPI's own errors, and those of a service's routes, the one shape."""
    assert isinstance(error, HTTPException)
    fallback = KINDS["internal"] if error.status_code >= 500 else KINDS["bad-request"]
    kind = BY_STATUS.get(error.status_code, fallback)
    phrase = HTTPStatus(error.status_code).phrase
    detail = kind.remedy if error.detail == phrase else error.detail
    if kind.status != error.status_code:
        kind = Kind(kind.slug, error.status_code, phrase, kind.remedy)
    return problem(request, kind, str(detail), headers=error.headers)


async def on_invalid(request: Request, error: Exception) -> Problem:
    """Say which field is wrong and why; never repeat what was sent, which may hold secrets."""
    assert isinstance(error, RequestValidationError)
    parts = error.errors()
    content_type = request.headers.get("content-type", "")
    whole_body = [part for part in parts if tuple(part["loc"]) == ("body",)]
    if whole_body and content_type and "json" not in content_type:
        detail = f"this path reads JSON, not {content_type.split(';')[0]}: send `Content-Type: application/json`"
        return problem(request, KINDS["unsupported-media-type"], detail)
    errors = [field_error(part) for part in parts]
    return problem(request, KINDS["invalid"], listed(errors), errors=errors)


def field_error(part: Mapping[str, Any]) -> dict[str, str]:
    if part.get("type") == "json_invalid" and len(part["loc"]) == 2:
        # The framework gives the position in the text as if it were a field.
        return {"field": "body", "message": f"{part['msg']} at character {part['loc'][1]}"}
    return {"field": field_of(part["loc"]), "message": part["msg"]}


# What is not named here does not fit, as a whole.
OF_ENGINE: dict[type[EngineError], str] = {
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
    """What was asked of an action or a run cannot be: whether by a route of ours or by `trigger` in one of yours."""
    assert isinstance(error, EngineError)
    slug = next((OF_ENGINE[each] for each in type(error).__mro__ if each in OF_ENGINE), "invalid")
    extra: dict[str, Any] = {}
    if slug == "invalid":
        extra["errors"] = error.errors if isinstance(error, PayloadInvalid) else []
    if isinstance(error, AlreadyActive):
        extra["run"] = error.run_id
    headers = {"Retry-After": "1"} if slug == "key-in-flight" else None
    return problem(request, KINDS[slug], str(error), headers=headers, **extra)


async def on_lock_error(request: Request, error: Exception) -> Problem:
    """A lock is not to be had, or was lost: whether in a route of yours or in ours."""
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
    """No permit, or a breaker that is open, met by a route that does not catch it."""
    assert isinstance(error, LimitError | BreakerError)
    if isinstance(error, LimitInvalid | BreakerInvalid):
        return problem(request, KINDS["invalid"], str(error), errors=[])
    assert isinstance(error, LimitReached | BreakerOpen)
    slug = "too-many-requests" if isinstance(error, LimitReached) else "upstream-unavailable"
    retry_after = max(1, math.ceil(error.retry_after))
    return problem(request, KINDS[slug], str(error), headers={"Retry-After": str(retry_after)})


async def on_database_error(request: Request, error: Exception) -> Problem:
    """A database that is away is 503, and the client may try again; any other error of it is a defect of ours.

    A connection that broke while a request changed something leaves it open whether the change was committed.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, PoolTimeout | PoolFull):
        detail = "every database connection is in use; try again shortly, or at another instance"
        return problem(request, KINDS["unavailable"], detail, headers={"Retry-After": "1"})
    broke = cause is not None and broke_off(cause)
    if broke and request.method not in SAFE:
        detail = "the connection to the database broke before it confirmed the change: look whether the change is there"
        return problem(request, KINDS["outcome-unknown"], detail)
    if broke or (cause is not None and is_away(cause)):
        detail = "the database does not answer at the moment; try again shortly"
        return problem(request, KINDS["unavailable"], detail, headers={"Retry-After": "2"})
    log.error("request.failed", error=error, method=request.method, path=request.url.path)
    return await on_unexpected(request, error)


async def on_outcome_unknown(request: Request, error: Exception) -> Problem:
    return problem(request, KINDS["outcome-unknown"], str(error))


async def on_unexpected(request: Request, _: Exception) -> Problem:
    detail = f"the error is in this service's log under request id {request_id.get()}"
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


def install(app: FastAPI) -> None:
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.include_router(pages)
    generate = app.openapi
    app.openapi = lambda: declare(generate())  # type: ignore[method-assign]  # as the framework's documentation does


# -- OpenAPI ----------------------------------------------------------------------------------------------------------


class FieldError(BaseModel):
    """What is wrong with one field."""

    field: str = Field(description="Its path, with dots: `runs.3.payload.weight`, `query.limit`")
    message: str


class ProblemDetails(BaseModel):
    """An error, as RFC 9457 has it. Some kinds have more members."""

    model_config = ConfigDict(title="Problem", extra="allow")

    type: str = Field(description="The kind, as a path of this service: GET it for an explanation")
    title: str
    status: int
    detail: str = Field(description="What happened, and what to do")
    instance: str = Field(description="The path of the request")
    request_id: str | None = Field(description="The log has it on every line of this request")
    errors: list[FieldError] | None = Field(None, description=f"The fields that do not fit, the first {ERRORS_MOST}")
    errors_left_out: int | None = Field(None, description="How many more fields do not fit")
    run: int | None = Field(None, description="The run that is active already, if that is the conflict")


REFERENCE = "#/components/schemas/{model}"


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return how OpenAPI declares these statuses: for `responses=` of a route."""
    content = {Problem.media_type: {"schema": {"$ref": REFERENCE.format(model="Problem")}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def declare(schema: dict[str, Any]) -> dict[str, Any]:
    """Declare the one shape of errors, in place of the framework's own, and the statuses that follow from a route."""
    shapes = schema.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        shapes.pop(unused, None)
    shape = ProblemDetails.model_json_schema(ref_template=REFERENCE)
    shapes |= shape.pop("$defs")
    shapes["Problem"] = shape
    for operations in schema["paths"].values():
        for method, operation in operations.items():
            responses = operation["responses"]
            if "HTTPValidationError" in str(responses.get("422")):
                del responses["422"]
            for status, declared in refusals(*statuses(method, operation)).items():
                responses.setdefault(str(status), declared)
    return schema


def statuses(method: str, operation: Mapping[str, Any]) -> Iterator[int]:
    """Return the statuses that follow from what a route takes and needs."""
    parameters = operation.get("parameters", [])
    changes = method not in {"get", "head"}
    if any(each["in"] == "path" for each in parameters):
        yield 404
    if changes:
        yield 413
    if "requestBody" in operation:
        yield from (400, 415)
    if parameters or "requestBody" in operation:
        yield 422
    if operation.get("security"):
        # Every key may read.
        yield from (401, 403, 429) if changes else (401, 429)
    yield from (500, 503)


# -- the pages that `type` leads to -----------------------------------------------------------------------------------

pages = APIRouter(tags=["problems"], default_response_class=PlainTextResponse)


def page(kind: Kind) -> str:
    return f"{kind.title}\n{'=' * len(kind.title)}\n\nStatus {kind.status}. {kind.remedy}\n"


@pages.get("/problems")
async def problem_pages() -> str:
    """List every kind of problem."""
    return "".join(f"/problems/{kind.slug}  {kind.status}  {kind.title}\n" for kind in KINDS.values())


@pages.get("/problems/{slug}")
async def problem_page(slug: str) -> str:
    """Explain one kind of problem."""
    if slug not in KINDS:
        raise NotFound(f"there is no problem called {slug!r}: GET /problems lists them")
    return page(KINDS[slug])
