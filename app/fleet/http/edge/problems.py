"""Every error at the edge has one shape: `application/problem+json` (RFC 9457), with a `type` that leads somewhere.

    {"type": "/problems/unauthorized", "title": …, "status": 401, "detail": "what to do", "instance": "/actions",
     "request_id": …}

`type` is a path of this very service: `GET` it for the page that explains it. `detail` says what to do. Nothing of the
inside goes out: an unexpected error says only under which request id the log has it.

A problem is bounded, whatever was sent: a field's name is repeated, cut to `MAX_FIELD_LENGTH` characters, and `errors`
has at most `MAX_ERRORS` entries. A field is named by its path, with dots: in the body by that alone (`priority`,
`runs.3.payload.weight`), elsewhere after the place where it stands (`query.limit`, `header.Idempotency-Key`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from app.fleet.errors import FleetError
from app.fleet.telemetry.logs import request_id
from app.fleet.telemetry.redaction import redact

# Methods that change nothing.
SAFE_METHODS = {"GET", "HEAD", "OPTIONS", "TRACE"}
MAX_ERRORS = 20
MAX_FIELD_LENGTH = 100
MAX_MESSAGE_LENGTH = 300
MAX_DETAIL_LENGTH = 1000
MAX_PATH_LENGTH = 500


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


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def listed(errors: Sequence[Mapping[str, Any]]) -> str:
    """Write the first errors as one text."""
    first = "; ".join(f"{cut(each['field'], MAX_FIELD_LENGTH)}: {each['message']}" for each in errors[:3])
    return first + (f"; and {len(errors) - 3} more" if len(errors) > 3 else "")


def field_of(location: Sequence[str | int]) -> str:
    """Name a field by its path; in the body without the word `body` before it."""
    first, *rest = location or ("body",)
    return ".".join(str(step) for step in (rest if rest and first == "body" else location or ("body",)))
