"""The outermost layer: every request and response passes here, the errors of everything inside included.

Pure ASGI, and one object for all of it, because each thing it does needs the same few facts:

- a request id, the client's if it sent a sensible one, on the response and on every log line of the request;
- our own count of requests in flight, which the shutdown waits on: uvicorn forgets requests it has cancelled;
- the body limit, by the declared length before anything is read, and by what really arrives;
- the API key of a route that needs one, before any of the body is read (`auth.check_key`);
- without API keys, the refusal of state-changing requests that a browser sends for a page of another site;
- the refusal of requests on a connection beyond the limit (`server.py`), probes excepted;
- HEAD for every path that has GET: the same status and headers, and whatever would write the body is ended;
- the log line of a request that failed, with its id, and the one of every request that may change something; of a
  request whose client left in the middle of the body, one line without a traceback;
- security headers, unless a route set them itself;
- while draining, `Connection: close` on every response, so that clients go elsewhere by themselves;
- while draining, the clean end of every Server-Sent Events stream: its generator is told that the client left, and
  the client gets a last `retry:` with jitter and a proper end, which makes it reconnect, to another instance. Other
  responses, a long download for one, are left to finish;
- a stream of events whose client reads nothing is cut: it would be kept in memory, and hold a drain up.

A start-up that was refused says why in one line, instead of a traceback (see `_lifespan`).
"""

import asyncio
import random
import re
import secrets
from collections.abc import Awaitable
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.fleet.errors import FleetError
from app.fleet.http.edge import audit, auth
from app.fleet.http.edge.context import Context
from app.fleet.http.edge.problems import (
    KINDS,
    SAFE_METHODS,
    Forbidden,
    HttpError,
    PayloadTooLarge,
    Unavailable,
    problem,
)
from app.fleet.lifecycle import Phase
from app.fleet.server import protocol
from app.fleet.telemetry.logs import PROBES, events, request_id

log = events(__name__)

SENSIBLE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
RETRY_MS = (500, 3000)
# How the paths of streams end. Their clients come many at once, when an instance has gone, and wait for a turn each.
STREAMS = "/events"
# How long a stream's client may read nothing, and how long while draining.
STALLED = 30.0
STALLED_DRAINING = 1.0
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "content-security-policy": "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
HSTS = "max-age=31536000; includeSubDomains"
DISCONNECT: Message = {"type": "http.disconnect"}


class Edge:
    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif scope["type"] == "http":
            await Exchange(self._app, self._context, scope, receive, send).run()
        else:
            await self._app(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the lifespan on; where it was refused on purpose, say so in its own words."""
        context = self._context

        async def explained(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed" and context.refused is not None:
                message = {**message, "message": f"refused to start: {context.refused}"}
            await send(message)

        try:
            await self._app(scope, receive, explained)
        except FleetError as error:
            # uvicorn has its message and ends with 3; a traceback would only hide the text that says what to do.
            if error is not context.refused:
                raise


class Exchange:
    """One request and its response."""

    # A stream of events has one for as long as it is open.
    __slots__ = (
        "_app", "_as_get", "_body_read", "_context", "_ended", "_has_body", "_id", "_left", "_listening", "_over_limit",
        "_receive", "_received", "_scope", "_send", "_started", "_status", "_streams_events",
    )  # fmt: skip

    def __init__(self, app: ASGIApp, context: Context, scope: Scope, receive: Receive, send: Send) -> None:
        self._app = app
        self._context = context
        self._scope = scope
        self._receive = receive
        self._send = send
        headers = Headers(scope=scope)
        self._id = sensible_id(headers.get("x-request-id"))
        self._has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        self._over_limit = protocol.is_over_limit(scope)
        self._received = 0
        self._body_read = False
        self._left = False
        self._streams_events = False
        self._started = False
        self._status: int | None = None
        self._ended = False
        self._listening: asyncio.Timeout | None = None
        # Set for a HEAD request that has no route of its own: the application is asked again, with GET.
        self._as_get: Scope | None = None

    async def run(self) -> None:
        context = self._context
        token = request_id.set(self._id)
        if context.has_engine:
            context.engine.enter()
        context.in_flight += 1
        try:
            self._refuse_over_limit()
            self._refuse_cross_site()
            self._check_declared_length()
            if self._scope["path"].endswith(STREAMS):
                await context.openings.wait()
            try:
                await self._answer()
            except ExceptionGroup as errors:
                if not (self._streams_events and was_let_go(errors)):
                    raise
            if self._streams_events and not self._ended:
                await self._end_stream()
        except HttpError as error:
            # Refused out here, before anything inside was asked.
            if self._started:
                raise
            refusal = problem(Request(self._scope), KINDS[error.slug], error.detail, headers=error.headers)
            await refusal(self._scope, self._receive, self.send)
        except ClientDisconnect:
            # Logged and counted where it was noticed.
            pass
        except Exception as error:
            # Answered with 500 inside. Logged here, where the request id is still known, and not once more by the
            # server, unless it has to cut a response that will never be whole.
            log.error("request.failed", error=error, method=self._scope["method"], path=self._scope["path"])
            if not self._ended:
                raise
        finally:
            audit.record(context, self._scope, self._status)
            context.in_flight -= 1
            request_id.reset(token)

    async def _answer(self) -> None:
        if self._scope["method"] != "HEAD":
            await self._app(self._scope, self.receive, self.send)
            return
        as_get = {**self._scope, "method": "GET"}
        await self._app(self._scope, self.receive, self._send_unless_not_allowed)
        if not self._started:
            self._as_get = as_get
            await self._app(as_get, self.receive, self.send)

    async def _send_unless_not_allowed(self, message: Message) -> None:
        if self._started or message.get("status", 200) != 405:
            await self.send(message)

    # -- what comes in ------------------------------------------------------------------------------------------------

    def _refuse_over_limit(self) -> None:
        if self._over_limit and self._scope["path"] not in PROBES:
            self._context.connections.count("limit")
            raise Unavailable("this instance has as many connections as it may: try again, or at another instance")

    def _refuse_cross_site(self) -> None:
        """Without API keys, anybody's page could have a browser on this machine or network operate the service."""
        if self._context.settings.api_keys or self._scope["method"] in SAFE_METHODS:
            return
        headers = Headers(scope=self._scope)
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is None and origin is not None:
            site = "same-origin" if urlsplit(origin).netloc == headers.get("host") else "cross-site"
        if site == "cross-site":
            raise Forbidden(
                "a page of another site sent this, and without API keys only this service's own pages may change "
                "anything: set FLOTILLA_API_KEYS, and send a key"
            )

    async def receive(self) -> Message:
        if self._as_get is not None and self._ended:
            return DISCONNECT
        if self._body_read:
            return await self._disconnect_or_drain()
        if not self._received:
            auth.check_key(self._scope, self._context)
        message = await self._receive()
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            self._check_length(self._received)
            self._body_read = not message.get("more_body", False)
        elif self._has_body and not self._left:
            self._left = True
            self._context.abandoned += 1
            log.info(
                "request.abandoned", method=self._scope["method"], path=self._scope["path"], received=self._received
            )
        return message

    async def _disconnect_or_drain(self) -> Message:
        """Wait for the client to leave; for a stream of events, a drain looks the same."""
        at_drain = self._context.lifecycle.at_drain
        self._listening = asyncio.timeout(None)
        at_drain.add(self._let_go)
        try:
            async with self._listening:
                self._let_go()
                return await self._receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        finally:
            self._listening = None
            at_drain.discard(self._let_go)

    def _let_go(self) -> None:
        """Called whenever it may have become true that this is a stream and this instance drains."""
        listening, draining = self._listening, self._context.lifecycle.phase is Phase.DRAINING
        if self._streams_events and draining and listening is not None and listening.when() is None:
            listening.reschedule(asyncio.get_running_loop().time())

    def _check_declared_length(self) -> None:
        declared = Headers(scope=self._scope).get("content-length", "")
        if declared.isdecimal():
            self._check_length(int(declared))

    def _check_length(self, length: int) -> None:
        limit = self._context.settings.max_body
        if length > limit:
            raise PayloadTooLarge(
                f"the body is larger than {limit} bytes, and nothing of it was kept: send less at once",
                headers={"Connection": "close"},
            )

    # -- what goes out ------------------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._status = message["status"]
            self._dress(MutableHeaders(scope=message), message["status"])
            self._let_go()
            if self._as_get is not None:
                await self._send(message)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
                self._ended = True
        elif self._as_get is not None:
            return
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        if self._streams_events:
            await self._send_or_cut(message)
        else:
            await self._send(message)

    async def _send_or_cut(self, message: Message) -> None:
        patience = STALLED_DRAINING if self._context.lifecycle.draining.is_set() else STALLED
        try:
            async with asyncio.timeout(patience):
                await self._send(message)
        except TimeoutError:
            log.info("stream.cut", path=self._scope["path"], seconds=patience)
            if protocol.reset(self._send):
                # Until the server knows; what follows is sent nowhere, and the application hears that the client left.
                await self._receive()

    def _dress(self, headers: MutableHeaders, status: int) -> None:
        headers["x-request-id"] = self._id
        for name, value in SECURITY_HEADERS.items():
            headers.setdefault(name, value)
        if self._context.settings.production:
            headers.setdefault("strict-transport-security", HSTS)
        if self._over_limit or self._context.lifecycle.phase is Phase.DRAINING:
            headers["connection"] = "close"
        if status == 405 and "GET" in (allowed := headers.get("allow", "").split(", ")):
            headers["allow"] = ", ".join(dict.fromkeys([*allowed, "HEAD"]))
        self._streams_events = headers.get("content-type", "").startswith("text/event-stream")

    def _end_stream(self) -> Awaitable[None]:
        retry = random.randint(*RETRY_MS)
        return self.send({"type": "http.response.body", "body": b"retry: %d\n\n" % retry, "more_body": False})


def was_let_go(errors: "ExceptionGroup[Exception]") -> bool:
    """Whether this is what the framework makes of a stream that was let go while it had more to say."""
    return errors.split((anyio.BrokenResourceError, anyio.ClosedResourceError))[1] is None


def sensible_id(given: str | None) -> str:
    return given if given and SENSIBLE_ID.fullmatch(given) else secrets.token_hex(16)
