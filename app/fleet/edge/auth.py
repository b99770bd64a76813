"""Authentication: each route requires an API key with a scope. A scope includes those before it:

    read       read everything
    operate    change what runs: trigger, cancel, retry, pause; also a service's own routes
    admin      override what protects data: release a lock that an instance holds

In production the service does not start without keys. In development without keys, every route is open. Probes are
always open, and answer with their status only. Refused keys are counted, and unknown ones limited (`refused_keys.py`).
"""

import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param

from app.fleet.api_keys import KEY, Scope, digest
from app.fleet.edge.context import Context, InContext
from app.fleet.edge.problems import Forbidden, TooManyRequests, Unauthorized, Unavailable
from app.fleet.settings import FleetSettings

RANK = {"read": 0, "operate": 1, "admin": 2}
STREAM_RETRY_AFTER = 5

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
    """Return a dependency that requires a key with this scope; None: `read` for GET and HEAD, else `operate`."""

    async def authorise(
        request: Request,
        context: InContext,
        # For the OpenAPI schema; `check` reads the headers.
        _token: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)] = None,
        _key: Annotated[str | None, Depends(header)] = None,
    ) -> None:
        check(request, context, scope)

    authorise.required_scope = scope  # type: ignore[attr-defined]
    return authorise


def check_key(scope: MutableMapping[str, Any], context: Context) -> None:
    """Refuse a request whose key its route would refuse, before the body is read; dependencies run after that.

    The route and its dependencies are in the ASGI scope, where FastAPI puts them. If they are missing, the body is read
    first, and the dependency refuses the request.
    """
    if not context.settings.api_keys:
        return
    route = scope.get("fastapi", {}).get("effective_route_context") or scope.get("route")
    dependant = getattr(route, "dependant", None)
    for dependency in getattr(dependant, "dependencies", ()):
        if hasattr(dependency.call, "required_scope"):
            check(Request(scope), context, dependency.call.required_scope)


def check(request: Request, context: Context, scope: Scope | None) -> None:
    """Refuse a request whose key does not have the scope."""
    scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
    given = token if scheme.lower() == "bearer" and token else request.headers.get("x-api-key")
    check_given(request, context, given, scope or ("read" if request.method in {"GET", "HEAD"} else "operate"))


def check_given(request: Request, context: Context, given: str | None, required: Scope) -> None:
    """Refuse a request with this key if the key does not have the scope. If no keys are configured, refuse none."""
    request.state.key = None
    if not context.settings.api_keys:
        return
    if not given:
        context.refused_keys.count("missing")
        raise Unauthorized(
            f"this request needs an API key with the scope {required!r}: send it as `Authorization: Bearer …`",
            headers={"WWW-Authenticate": "Bearer"},
        )
    hashed = digest(given)
    key = line_of(context.settings, hashed)
    if key is None:
        if wait := context.refused_keys.unknown_key(request.client.host if request.client else ""):
            raise TooManyRequests(
                "this address has sent too many requests with unknown API keys: check the key, then try again",
                retry_after=wait,
            )
        raise Unauthorized(
            "this API key is unknown: check that it is complete, and still in this service's settings",
            headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
        )
    request.state.key = hashed
    if RANK[key["scope"]] < RANK[required]:
        context.refused_keys.count("scope")
        raise Forbidden(
            f"this request needs an API key with the scope {required!r}, and this key has {key['scope']!r}: "
            f"use another key"
        )


def key_of(request: Request) -> str | None:
    """Return the digest of the request's key, or None if no keys are configured."""
    key: str | None = request.state.key
    return key


def name_of_key(context: Context, key: str | None) -> str | None:
    """Return the name of the key with this digest."""
    found = line_of(context.settings, key) if key is not None else None
    return found["name"] if found is not None else None


async def stream_slot(request: Request, context: InContext) -> AsyncIterator[None]:
    """Count this stream as open, or refuse it at the limit of the instance or of its API key."""
    settings, open_streams, key = context.settings, context.open_streams, key_of(request)
    # A quarter of the connections is left for other requests.
    limit = min(settings.streams, context.connections.limit * 3 // 4)
    if open_streams.total() >= limit:
        raise limit_reached(f"this instance has {limit} streams open, which is its limit")
    if key is not None and open_streams[key] >= settings.streams_per_key:
        raise limit_reached(f"this API key has {settings.streams_per_key} streams open here, which is its limit")
    open_streams[key] += 1
    try:
        yield
    finally:
        open_streams[key] -= 1
        if not open_streams[key]:
            del open_streams[key]


def limit_reached(reason: str) -> Unavailable:
    return Unavailable(f"{reason}: try again shortly, or at another instance", retry_after=STREAM_RETRY_AFTER)
