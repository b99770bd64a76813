"""The viewer of the dashboard: sign-in with an API key, and the cookie of the session.

    own       With a sign-in of the service itself (`app/startup.py`), it decides about each request, as for the API.
              The rest of this is not used then.
    sign-in   The key is checked as in a request to the API, with the same limit for unknown keys.
    cookie    `NAME.EXPIRES.SIGNATURE`: the name of the key, and an HMAC of both, whose secret is the key's digest and
              the password of the database. So every instance with the same settings accepts it, nothing is stored, and
              a key that is removed from the settings ends its sessions. The digest alone, which is no secret by
              design, makes no session. The cookie is HttpOnly and SameSite=Lax, and in production Secure.
    form      Each form has a token (`forms.py`).

The scope of the viewer is checked at each write: `read` looks, `operate` changes runs and actions and closes breakers,
`admin` releases locks.
Without both, which only development allows, every viewer may do everything, as every client of the API may.
"""

import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request, Response
from fastapi.responses import RedirectResponse

from app.fleet.api_keys import KEY, Scope, digest
from app.fleet.dashboard.frame.forms import PATH, check_form, fields, set_cookie
from app.fleet.dashboard.frame.page import SignInNeeded, new_router, show
from app.fleet.edge.auth import caller_of_key, caller_of_line, find_caller, line_of
from app.fleet.edge.callers.caller import ANYONE, Caller
from app.fleet.edge.context import Context, InContext
from app.fleet.edge.problems import SAFE_METHODS, Forbidden, Unauthorized
from app.fleet.settings import FleetSettings, passwords

LIFETIME = 12 * 3600
COOKIE = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,64})\.(?P<expires>[0-9]{1,12})\.(?P<signature>[0-9a-f]{64})")

router = new_router()


async def viewer(request: Request, context: InContext) -> Caller:
    """Return who is signed in; otherwise lead to the sign-in."""
    if context.sign_in is not None:
        return await find_caller(request, context)
    settings = context.settings
    caller = ANYONE
    if settings.api_keys:
        line = line_of_cookie(settings, request.cookies.get(session_cookie(settings), ""))
        if line is None:
            raise SignInNeeded(request)
        caller = caller_of_line(line)
    # The audit log names the caller.
    request.state.caller = caller
    return caller


InViewer = Annotated[Caller, Depends(viewer)]


def may(scope: Scope) -> Callable[..., Awaitable[Caller]]:
    """Return a dependency for a write: the scope, and a form that this dashboard has made.

    The page that asks before a write has it too: it is only for those who may go on.
    """

    async def authorise(request: Request, context: InContext, who: InViewer) -> Caller:
        if not who.may(scope):
            context.refused_keys.count("scope")
            raise Forbidden(f"this needs the scope {scope!r}, and you have signed in with {who.scope!r}")
        if request.method not in SAFE_METHODS:
            await check_form(request, context.settings)
        return who

    return authorise


# -- the cookie of a session ------------------------------------------------------------------------------------------


def session_cookie(settings: FleetSettings) -> str:
    """Return the cookie's name. Cookies are shared by all ports of a host, so it contains the namespace."""
    return f"{settings.namespace}-session"


def signed(settings: FleetSettings, line: re.Match[str], expires: int) -> str:
    """Return the cookie of a session with the key of this line."""
    address = settings.database_url.get_secret_value() if settings.database_url else ""
    secret = ":".join(["dashboard", line["digest"], *passwords(address)])
    signature = hmac.new(secret.encode(), f"{line['name']}:{expires}".encode(), hashlib.sha256)
    return f"{line['name']}.{expires}.{signature.hexdigest()}"


def line_of_cookie(settings: FleetSettings, cookie: str) -> re.Match[str] | None:
    """Return the settings' line of the key with which this session was signed in, if it is still valid."""
    parts = COOKIE.fullmatch(cookie)
    if parts is None or int(parts["expires"]) < time.time():
        return None
    for each in settings.api_keys:
        line = KEY.fullmatch(each.get_secret_value())
        assert line is not None
        if hmac.compare_digest(signed(settings, line, int(parts["expires"])), cookie):
            return line
    return None


# -- the pages --------------------------------------------------------------------------------------------------------


@router.get("/sign-in")
async def sign_in_page(request: Request, context: InContext, to: str = PATH) -> Response:
    if context.sign_in is not None:
        return RedirectResponse(own_path(to), 303)
    return show_sign_in(request, context, to)


@router.post("/sign-in")
async def sign_in(request: Request, context: InContext) -> Response:
    await check_form(request, context.settings)
    given = await fields(request)
    to, key = given.get("to", PATH), given.get("key", "").strip()
    response = RedirectResponse(own_path(to), 303)
    if context.sign_in is not None or not context.settings.api_keys:
        return response
    try:
        # As the API does, also for an address that has sent many unknown keys.
        request.state.caller = caller_of_key(request, context, key, "read")
    except Unauthorized as error:
        return show_sign_in(request, context, to, error.detail, 401)
    line = line_of(context.settings, digest(key))
    if line is not None:
        value = signed(context.settings, line, int(time.time()) + LIFETIME)
        set_cookie(response, context.settings, session_cookie(context.settings), value, LIFETIME, "lax")
    return response


@router.post("/sign-out")
async def sign_out(request: Request, context: InContext) -> Response:
    await check_form(request, context.settings)
    response = RedirectResponse(f"{PATH}/sign-in", 303)
    response.delete_cookie(session_cookie(context.settings), path=PATH)
    return response


def show_sign_in(request: Request, context: Context, to: str, error: str | None = None, status: int = 200) -> Response:
    return show(request, context, "sign_in.html", None, status=status, title="Sign in", to=own_path(to), error=error)


def own_path(to: str) -> str:
    """Return this path if it is one of the dashboard: a link must not lead to another site after the sign-in."""
    return to if re.fullmatch(rf"{PATH}(/[^\\\s]*)?(\?[^\\\s]*)?", to) else PATH
