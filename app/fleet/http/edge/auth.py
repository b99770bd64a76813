"""API keys: who may read, operate, administrate.

A key is a random secret; the settings hold its SHA-256 only. Scopes contain each other:

    read       see everything
    operate    change what runs: trigger, cancel, retry, pause; a service's own routes
    admin      override what protects data: release a lock that an instance holds

In production the service refuses to start without keys; in development, with none set, everything is open. Probes are
open always, and answer with their status only. Refused keys are counted, and slowed down (`refusals.py`).
"""

import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param

from app.fleet.api_keys import KEY, Scope, digest
from app.fleet.http.edge.context import Context, InContext
from app.fleet.http.edge.problems import Forbidden, TooManyRequests, Unauthorized
from app.fleet.settings import FleetSettings

RANK: dict[Scope, int] = {"read": 0, "operate": 1, "admin": 2}

bearer = HTTPBearer(auto_error=False, description="An API key")
header = APIKeyHeader(name="X-API-Key", auto_error=False, description="An API key")


def scope_of(settings: FleetSettings, key: str) -> Scope | None:
    """Return what a key may do. Every line is compared, in constant time, whatever matches."""
    found = line_of(settings, digest(key))
    return found["scope"] if found is not None else None  # type: ignore[return-value]  # the pattern allows these only


def line_of(settings: FleetSettings, given: str) -> re.Match[str] | None:
    """Return the line of a key, by its digest."""
    found = None
    for line in settings.api_keys:
        parts = KEY.fullmatch(line.get_secret_value())
        assert parts is not None
        if hmac.compare_digest(parts["digest"], given):
            found = parts
    return found


def needs(scope: Scope | None = None) -> Callable[..., Awaitable[None]]:
    """Make a dependency that lets a key with this scope pass; None means `read` for GET, `operate` for the rest."""

    async def authorise(
        request: Request,
        context: InContext,
        # For the schema; `check` reads the headers.
        _token: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)] = None,
        _key: Annotated[str | None, Depends(header)] = None,
    ) -> None:
        check(request, context, scope)

    authorise.checks = scope  # type: ignore[attr-defined]
    return authorise


def check_key(scope: MutableMapping[str, Any], context: Context) -> None:
    """Refuse a request whose key its route will refuse. Called before the body is read, as dependencies are not.

    FastAPI keeps the route in the ASGI scope, with its dependencies. Where it does not, the body is read first, and the
    dependency refuses.
    """
    if not context.settings.api_keys:
        return
    route = scope.get("fastapi", {}).get("effective_route_context") or scope.get("route")
    dependant = getattr(route, "dependant", None)
    for dependency in getattr(dependant, "dependencies", ()):
        if hasattr(dependency.call, "checks"):
            check(Request(scope), context, dependency.call.checks)


def check(request: Request, context: Context, scope: Scope | None) -> None:
    """Refuse a request whose key does not have the scope; without any keys, let everything pass."""
    needed: Scope = scope or ("read" if request.method in {"GET", "HEAD"} else "operate")
    request.state.key = None
    if not context.settings.api_keys:
        return
    scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
    given = token if scheme.lower() == "bearer" and token else request.headers.get("x-api-key")
    if not given:
        context.refused_keys.count("missing")
        raise Unauthorized(
            f"this needs an API key with the scope {needed!r}: send `Authorization: Bearer …`",
            headers={"WWW-Authenticate": "Bearer"},
        )
    granted = scope_of(context.settings, given)
    if granted is None:
        if wait := context.refused_keys.unknown_key(request.client.host if request.client else ""):
            raise TooManyRequests(
                "too many requests with unknown API keys came from this address: check the key, then try again",
                retry_after=wait,
            )
        raise Unauthorized(
            "this API key is not known here: check that it is complete and still configured",
            headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
        )
    request.state.key = digest(given)
    if RANK[granted] < RANK[needed]:
        context.refused_keys.count("scope")
        raise Forbidden(f"this needs an API key with the scope {needed!r}, and yours has {granted!r}")


def key_of(request: Request) -> str | None:
    """Return what tells the keys of requests apart; None where there are no keys."""
    key: str | None = request.state.key
    return key


def name_of_key(context: Context, key: str | None) -> str | None:
    """Return the name of a key, for what is written down."""
    found = line_of(context.settings, key) if key is not None else None
    return found["name"] if found is not None else None
