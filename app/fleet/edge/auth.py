"""Authentication: each route requires a caller with a scope (`callers/caller.py`), by a key or the service's sign-in.

In production the service does not start without keys and without a sign-in. In development without them, every route
is open. Probes are always open, and answer with their status only. Refused keys are counted, and unknown ones limited
(`callers/refused_keys.py`).

A sign-in is a function `sign_in` in `app/startup.py`, which returns the `Caller` of a request. It decides for the API
and for the dashboard. If keys are set too, a request with the header `X-API-Key` is checked with them instead. The
sign-in is called once for each request, before the body is read. What it raises, other than an `HTTPException`, is
answered with 503, and so is a sign-in that has not returned after `SIGN_IN_TIMEOUT`. Then nothing happens: a caller
that cannot be checked may do nothing.
"""

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Annotated, Any, cast

from fastapi import Depends, HTTPException, Request
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param

from app.fleet.api_keys import KEY, Scope, digest
from app.fleet.edge.callers.caller import ANYONE, Caller
from app.fleet.edge.context import Context, InContext
from app.fleet.edge.cross_site import refuse_cross_site
from app.fleet.edge.problems import Forbidden, TooManyRequests, Unauthorized, Unavailable
from app.fleet.settings import FleetSettings
from app.fleet.telemetry.logs import event_log

STREAM_RETRY_AFTER = 5
SIGN_IN_RETRY_AFTER = 5
SIGN_IN_TIMEOUT = 10.0

log = event_log(__name__)

bearer = HTTPBearer(auto_error=False, description="An API key")
header = APIKeyHeader(name="X-API-Key", auto_error=False, description="An API key")


def line_of(settings: FleetSettings, given: str) -> re.Match[str] | None:
    """Return the settings' line for the key with this digest. All lines are compared, each in constant time."""
    found = None
    for line in settings.api_keys:
        parts = KEY.fullmatch(line.get_secret_value())
        assert parts is not None
        if hmac.compare_digest(parts["digest"], given):
            found = parts
    return found


def needs(scope: Scope | None = None) -> Callable[..., Awaitable[None]]:
    """Return a dependency that requires a caller with this scope; None: `read` for GET and HEAD, else `operate`."""

    async def authorise(
        request: Request,
        context: InContext,
        # For the OpenAPI schema; `check` reads the headers.
        _token: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)] = None,
        _key: Annotated[str | None, Depends(header)] = None,
    ) -> None:
        await check(request, context, scope)

    authorise.required_scope = scope  # type: ignore[attr-defined]
    return authorise


async def check_before_body(scope: MutableMapping[str, Any], context: Context) -> None:
    """Refuse a request whose caller its route would refuse, before the body is read; dependencies run after that.

    The route and its dependencies are in the ASGI scope, where FastAPI puts them. If they are missing, the body is read
    first, and the dependency refuses the request.
    """
    if not context.protected:
        return
    route = scope.get("fastapi", {}).get("effective_route_context") or scope.get("route")
    dependant = getattr(route, "dependant", None)
    for dependency in getattr(dependant, "dependencies", ()):
        if hasattr(dependency.call, "required_scope"):
            await check(Request(scope), context, dependency.call.required_scope)


async def check(request: Request, context: Context, scope: Scope | None) -> None:
    """Refuse a request whose caller does not have the scope."""
    required: Scope = scope or ("read" if request.method in {"GET", "HEAD"} else "operate")
    caller = await find_caller(request, context, required)
    if caller.may(required):
        return
    context.refused_keys.count("scope")
    if context.sign_in is None:
        raise Forbidden(
            f"this request needs an API key with the scope {required!r}, and this key has {caller.scope!r}: use "
            f"another key"
        )
    raise Forbidden(f"this request needs the scope {required!r}, and its caller has {caller.scope!r}")


async def find_caller(request: Request, context: Context, required: Scope = "read") -> Caller:
    """Return who sends a request, or refuse it."""
    state = request.state
    if known := getattr(state, "caller", None):
        return cast("Caller", known)
    # The audit log reads it, whether or not the request is refused.
    state.caller = None
    if has_key(request, context):
        scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
        given = token if scheme.lower() == "bearer" and token and context.sign_in is None else None
        state.caller = caller_of_key(request, context, given or request.headers.get("x-api-key"), required)
    else:
        # A browser may prove who its user is, by a cookie or by where it runs, without the user knowing.
        refuse_cross_site(request, context.settings)
        state.caller = ANYONE if context.sign_in is None else await signed_in(request, context)
    return cast("Caller", state.caller)


def has_key(request: Request, context: Context) -> bool:
    """Whether the caller of this request is checked by an API key."""
    if not context.settings.api_keys:
        return False
    return context.sign_in is None or "x-api-key" in request.headers


def caller_of_key(request: Request, context: Context, given: str | None, required: Scope) -> Caller:
    """Return the caller with this API key, or refuse the request."""
    if not given:
        context.refused_keys.count("missing")
        raise Unauthorized(
            f"this request needs an API key with the scope {required!r}: send it as `Authorization: Bearer …`",
            headers={"WWW-Authenticate": "Bearer"},
        )
    line = line_of(context.settings, digest(given))
    if line is None:
        if wait := context.refused_keys.unknown_key(request.client.host if request.client else ""):
            raise TooManyRequests(
                "this address has sent too many requests with unknown API keys: check the key, then try again",
                retry_after=wait,
            )
        raise Unauthorized(
            "this API key is unknown: check that it is complete, and still in this service's settings",
            headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
        )
    return caller_of_line(line)


def caller_of_line(line: re.Match[str]) -> Caller:
    return Caller(line["name"], cast("Scope", line["scope"]))


async def signed_in(request: Request, context: Context) -> Caller:
    """Return the caller that the service's own sign-in finds."""
    assert context.sign_in is not None
    try:
        async with asyncio.timeout(SIGN_IN_TIMEOUT):
            # Without the body, which is not read yet.
            return checked(await context.sign_in(Request(request.scope)))
    except HTTPException as error:
        context.refused_keys.count("scope" if error.status_code == 403 else "missing")
        raise
    except Exception as error:
        log.error("sign_in.failed", error=error)
        raise Unavailable(
            "the service cannot check at the moment who sends this request: try again shortly",
            retry_after=SIGN_IN_RETRY_AFTER,
        ) from error


def checked(caller: object) -> Caller:
    if not isinstance(caller, Caller):
        raise TypeError(f"the sign-in must return a `Caller`, and returned {type(caller).__name__}")
    return caller


def name_of(context: Context, caller: Caller) -> str:
    """Return who did something, for what is stored of it."""
    if caller.name is None:
        return "the API, without a key"
    return f"API key {caller.name}" if context.sign_in is None else caller.name


async def stream_slot(request: Request, context: InContext) -> AsyncIterator[None]:
    """Count this stream as open, or refuse it at the limit of the instance or of its caller."""
    settings, open_streams, name = context.settings, context.open_streams, request.state.caller.name
    # A quarter of the connections is left for other requests.
    limit = min(settings.streams, context.connections.limit * 3 // 4)
    if open_streams.total() >= limit:
        raise limit_reached(f"this instance has {limit} streams open, which is its limit")
    if name is not None and open_streams[name] >= settings.streams_per_key:
        raise limit_reached(f"this caller has {settings.streams_per_key} streams open here, which is its limit")
    open_streams[name] += 1
    try:
        yield
    finally:
        open_streams[name] -= 1
        if not open_streams[name]:
            del open_streams[name]


def limit_reached(reason: str) -> Unavailable:
    return Unavailable(f"{reason}: try again shortly, or at another instance", retry_after=STREAM_RETRY_AFTER)
