"""A page of the dashboard: its template, its headers, and what it shows instead if something goes wrong.

Every error that the API answers with a problem (`app/fleet/edge/error_handlers.py`) is a page here, with the same text
and status. A read that takes longer than a second or two is cancelled, and the page shows this reason: a viewer must
not cost the database more than that.

Viewers with the same name and scope also share the HTML of a page for `KEPT` (`kept`): making it costs more CPU time
than anything else that a viewer causes. Only the tokens of forms differ, and they are filled in for each viewer.

The Content-Security-Policy allows only files of this service, and no script or style within a page.
"""

import asyncio
import functools
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import psycopg
from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined

from app.fleet.dashboard.frame import wording
from app.fleet.dashboard.frame.forms import PATH, form_token, keep_token
from app.fleet.dashboard.frame.shared_reads import shared
from app.fleet.db.pool.pool import Connection
from app.fleet.edge.callers.caller import Caller
from app.fleet.edge.context import Context
from app.fleet.edge.error_handlers import HANDLERS
from app.fleet.edge.problems import NotFound

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# How long viewers share the HTML of a page, in seconds. It has these instead of what differs for each response.
KEPT = 1.0
TOKEN, NONCE = "{the token of the forms}", "{a new nonce}"
# Seconds for the statements of one read.
TIME_LIMIT = 1.0
TOO_SLOW = "The database did not answer within a second or two. Try a narrower filter, or try again later."
# The headers of a problem that its page has too. A sign-in of the service may lead to another address.
KEPT_HEADERS = ("retry-after", "location", "www-authenticate")
MEDIA_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}

STATIC = {each.name: each.read_bytes() for each in files("app.fleet.dashboard").joinpath("static").iterdir()}
# The address of a file contains a digest of its content, so browsers keep it for ever.
VERSIONS = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in STATIC.items()}

templates = Environment(
    loader=PackageLoader("app.fleet.dashboard"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)
templates.globals |= {"path": PATH, "static": lambda name: f"{PATH}/static/{VERSIONS[name]}/{name}"}
templates.filters |= wording.FILTERS


class SignInNeeded(Exception):
    """Leads to the sign-in, and from there back to the page."""

    def __init__(self, request: Request) -> None:
        query = f"?{request.url.query}" if request.url.query else ""
        self.to = request.url.path + query if request.method in {"GET", "HEAD"} else PATH


class PageRoute(APIRoute):
    """A route that answers errors with pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_pages(request: Request) -> Response:
            try:
                return await handle(request)
            except SignInNeeded as error:
                return RedirectResponse(f"{PATH}/sign-in?to={quote(error.to, safe='/')}", 303)
            except (psycopg.errors.QueryCanceled, TimeoutError):
                return show_error(request, 503, "Too slow", TOO_SLOW)
            except Exception as error:
                handler = next((HANDLERS[each] for each in type(error).__mro__ if each in HANDLERS), None)
                if handler is None:
                    raise
                problem = await handler(request, error)
                body = json.loads(bytes(problem.body))
                return show_error(request, problem.status_code, body["title"], body["detail"], problem.headers)

        return handle_with_pages


def kept(page: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Let viewers share the HTML of a page. It has the parameters `request`, `context` and `who`, and uses `show`."""

    @functools.wraps(page)
    async def answer(**given: Any) -> Response:
        request, context, who = given["request"], given["context"], given["who"]

        async def make() -> bytes:
            request.state.is_kept = True
            try:
                return bytes((await page(**given)).body)
            finally:
                # If it has failed, the page that says so is for this viewer alone.
                request.state.is_kept = False

        key = ("page", request.url.port, request.url.path, request.url.query, who)
        html = await shared(request, key, make, statements=0, max_age=KEPT)
        token = form_token(request, context.settings)
        html = html.replace(TOKEN.encode(), token.encode()).replace(NONCE.encode(), secrets.token_hex(16).encode())
        response = HTMLResponse(html, 200, {"content-security-policy": POLICY})
        keep_token(request, response, context.settings, token)
        return response

    return answer


@asynccontextmanager
async def reading(context: Context) -> AsyncIterator[Connection]:
    """Borrow a connection for the statements of a page. After `TIME_LIMIT`, the present one is cancelled."""
    async with context.database.autocommit() as connection, asyncio.timeout(TIME_LIMIT):
        yield connection


def show(
    request: Request, context: Context, template: str, viewer: Caller | None, *, status: int = 200, **values: Any
) -> HTMLResponse:
    """Return a page."""
    is_kept = getattr(request.state, "is_kept", False)
    token = TOKEN if is_kept else form_token(request, context.settings)
    engine = context.engine if context.started else None
    html = templates.get_template(template).render(
        viewer=viewer,
        token=token,
        nonce=NONCE if is_kept else secrets.token_hex(16),
        namespace=context.settings.namespace,
        instance=context.member.identity.name if engine and context.member.identity else "",
        signs_in=bool(context.settings.api_keys) and context.sign_in is None,
        draining=context.lifecycle.draining.is_set(),
        age=getattr(request.state, "age", 0.0),
        other_ports=getattr(request.state, "other_ports", []),
        section=request.url.path.removeprefix(PATH).strip("/").partition("/")[0],
        **values,
    )
    response = HTMLResponse(html, status, {"content-security-policy": POLICY})
    keep_token(request, response, context.settings, token)
    return response


def show_error(request: Request, status: int, title: str, detail: str, headers: Any = None) -> Response:
    context: Context = request.app.state.fleet
    response = show(request, context, "error.html", None, status=status, title=title, detail=detail)
    for name in KEPT_HEADERS:
        if headers is not None and name in headers:
            response.headers[name] = headers[name]
    return response


def new_router() -> APIRouter:
    return APIRouter(prefix=PATH, route_class=PageRoute, include_in_schema=False)


router = new_router()


@router.get("/static/{version}/{name}")
async def static(version: str, name: str) -> Response:
    """Return a file of the dashboard. It has no secrets, so it needs no sign-in."""
    if name not in STATIC or version != VERSIONS[name]:
        raise NotFound("there is no such file")
    headers = {"cache-control": "public, max-age=31536000, immutable"}
    return Response(STATIC[name], 200, headers, MEDIA_TYPES[name.rpartition(".")[2]])
