"""Problems: the one format of every error, `application/problem+json` (RFC 9457).

    {"type": "/problems/unauthorized", "title": …, "status": 401, "detail": "what happened, and what to do",
     "instance": "/actions", "request_id": …}

`type` is a path of this service: `GET` it for a page that explains the kind. No internals are shown: for an unexpected
error, the detail is only the request id under which the log has it.

The size of a problem is bounded, whatever was sent: a field's name is cut to `MAX_FIELD_LENGTH` characters, and
`errors` has at most `MAX_ERRORS` entries. A field is named by its path, with dots. In the body that is the path alone
(`priority`, `runs.3.payload.weight`); elsewhere the location comes first (`query.limit`, `header.Idempotency-Key`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from app.fleet.errors import FleetError
from app.fleet.telemetry.logs import request_id
from app.fleet.telemetry.redaction import redact

# HTTP methods that change nothing.
SAFE_METHODS = {"GET", "HEAD", "OPTIONS", "TRACE"}
MAX_ERRORS = 20
MAX_FIELD_LENGTH = 100
MAX_MESSAGE_LENGTH = 300
MAX_DETAIL_LENGTH = 1000
MAX_PATH_LENGTH = 500


@dataclass(frozen=True)
class Kind:
    """One kind of problem. `remedy` is what the client should do, and the text of the kind's page."""

    slug: str
    status: int
    title: str
    remedy: str


KINDS = {
    kind.slug: kind
    for kind in (
        Kind(
            "bad-request",
            400,
            "The request cannot be understood",
            "Correct the request as `detail` says. The same request fails again.",
        ),
        Kind(
            "unauthorized",
            401,
            "It is unknown who sends the request",
            "Send an API key as `Authorization: Bearer …` or `X-API-Key: …`; an operator creates one with `flotilla "
            "key`. If the service has a sign-in of its own, send what that needs.",
        ),
        Kind(
            "forbidden",
            403,
            "The caller may not do this",
            "Use an API key with the scope that `detail` names. The scopes are read, operate and admin; each includes "
            "those before it.",
        ),
        Kind("not-found", 404, "Nothing was found at this path", "Check the path, and the name or id in it."),
        Kind(
            "method-not-allowed",
            405,
            "This path does not support the request's method",
            "Use a method that the `Allow` header lists.",
        ),
        Kind(
            "conflict",
            409,
            "The request conflicts with the current state",
            "Read the state of what `detail` names, then decide whether to send the request again.",
        ),
        Kind(
            "locked",
            409,
            "The lock that this request needs is already held",
            "`detail` names the holder. Send the request again after the seconds in `Retry-After`.",
        ),
        Kind(
            "key-in-flight",
            409,
            "A request with this Idempotency-Key is in progress",
            "Send the request again, unchanged, after the seconds in `Retry-After`. It then has the response of the "
            "first request.",
        ),
        Kind(
            "payload-too-large",
            413,
            "The request body is too large",
            "Send a smaller body. `FLOTILLA_MAX_BODY` is the limit in bytes. Nothing was written.",
        ),
        Kind(
            "unsupported-media-type",
            415,
            "This path does not accept the media type of the request body",
            "Send JSON, with `Content-Type: application/json`.",
        ),
        Kind(
            "invalid",
            422,
            "The request has invalid values",
            "Correct each field that `errors` names, as its message says. Nothing was written.",
        ),
        Kind(
            "key-reused",
            422,
            "Another request was sent with this Idempotency-Key",
            "Use a new `Idempotency-Key` for a new request. A repeated request must not change. Nothing was written.",
        ),
        Kind(
            "too-many-requests",
            429,
            "Too many requests",
            "Send the request again after the seconds in `Retry-After`.",
        ),
        Kind(
            "internal",
            500,
            "The service failed unexpectedly",
            "Search the service's log for `request_id`. The request may have had an effect, depending on where it "
            "failed: repeat it only if that is safe.",
        ),
        Kind(
            "outcome-unknown",
            500,
            "It is unknown whether the request took effect",
            "The connection to the database broke before it confirmed the change. Check whether the change was made "
            "before you repeat the request. A request with an `Idempotency-Key` can be repeated unchanged.",
        ),
        Kind(
            "unavailable",
            503,
            "The instance cannot serve this request now",
            "Send the request again after the seconds in `Retry-After`, to this or another instance. Either the "
            "database does not answer, or a limit of this instance is reached, or it is starting or draining, or its "
            "release does not have what was requested yet.",
        ),
        Kind(
            "upstream-unavailable",
            503,
            "Something that this request depends on is failing",
            "Send the request again after the seconds in `Retry-After`. It failed so often that the breaker in "
            "`detail` lets no calls through, at any instance.",
        ),
    )
}
# The first kind of a status is the general one.
BY_STATUS = {kind.status: kind for kind in reversed(KINDS.values())}


class HttpError(FleetError, HTTPException):
    """A request was refused; the class gives the kind of the problem, the text is its `detail`.

    It is an `HTTPException` too: while a body is read, the framework turns any other exception into a 400.
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
        "detail": cut(redact(detail), MAX_DETAIL_LENGTH),
        "instance": cut(request.url.path, MAX_PATH_LENGTH),
        "request_id": request_id.get(),
        **extra,
    }
    if errors is not None:
        body["errors"] = [
            {"field": cut(each["field"], MAX_FIELD_LENGTH), "message": cut(redact(each["message"]), MAX_MESSAGE_LENGTH)}
            for each in errors[:MAX_ERRORS]
        ]
        if len(errors) > MAX_ERRORS:
            body["errors_left_out"] = len(errors) - MAX_ERRORS
    return Problem(body, status_code=kind.status, headers=dict(headers or {}))


def cut(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def listed(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return the first errors as one text."""
    first = "; ".join(f"{cut(each['field'], MAX_FIELD_LENGTH)}: {each['message']}" for each in errors[:3])
    return first + (f"; and {len(errors) - 3} more" if len(errors) > 3 else "")


def field_of(location: Sequence[str | int]) -> str:
    """Return the name of a field: its path, in the body without the word `body` before it."""
    first, *rest = location or ("body",)
    return ".".join(str(step) for step in (rest if rest and first == "body" else location or ("body",)))


# -- the pages to which `type` leads -----------------------------------------------------------------------------------

router = APIRouter(tags=["problems"], default_response_class=PlainTextResponse)


@router.get("/problems")
async def list_problems() -> str:
    """List every kind of problem."""
    return "".join(f"/problems/{kind.slug}  {kind.status}  {kind.title}\n" for kind in KINDS.values())


@router.get("/problems/{slug}")
async def get_problem(slug: str) -> str:
    """Explain one kind of problem."""
    if slug not in KINDS:
        raise NotFound(f"there is no kind of problem {slug!r}: GET /problems lists all kinds")
    kind = KINDS[slug]
    return f"{kind.title}\n{'=' * len(kind.title)}\n\nStatus {kind.status}. {kind.remedy}\n"
