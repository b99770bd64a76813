"""The outermost ASGI middleware: every request and every response passes it, and so does every unhandled error.

It is one object, because each of its tasks needs the same few facts:

- The request id: the client's if it is valid, else a new one; in the response and in every log line of the request.
- The number of requests in flight, for which the shutdown waits: uvicorn does not count requests it has cancelled.
- The limit of the body, first by its declared length, then by what arrives.
- The client's address, from the headers of trusted proxies (`server/forwarded.py`).
- The caller of a route that needs one, before the body is read (`auth.check_before_body`).
- The headers for pages of other origins, also in its own refusals (`cross_site.py`).
- Requests on a connection beyond the limit (`server/connections.py`) are refused, except probes.
- HEAD for every path that has GET: the same status and headers; the application's body is discarded.
- Log lines: for each failed request; for each request that may change something; and, without a traceback, for each
  client that leaves before its body is complete.
- Security headers, unless the route has set them.
- While draining, `Connection: close` in every response, so that clients connect to other instances.
- While draining, the end of every Server-Sent Events stream: its generator sees a disconnect, and the client receives a
  last `retry:` with jitter and a complete response, after which it reconnects, to another instance. Other responses,
  such as a long download, are left to finish.
- A stream whose client reads nothing is closed: its events would fill the memory, and a drain would wait for it.

If the start-up is refused, the log has the reason in one line, without a traceback (`_lifespan`).
"""

import asyncio
import random
import re
import secrets
from collections.abc import MutableMapping
from typing import Any

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.fleet.edge import audit, auth
from app.fleet.edge.context import Context
from app.fleet.edge.cross_site import with_cors
from app.fleet.edge.problems import (
    KINDS,
    HttpError,
    PayloadTooLarge,
    Unavailable,
    problem,
)
from app.fleet.errors import FleetError
from app.fleet.lifecycle import Phase
from app.fleet.server import protocol
from app.fleet.server.forwarded import TrustedProxies
from app.fleet.telemetry.logs import PROBES, event_log, request_id

log = event_log(__name__)

VALID_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
RETRY_MS = (500, 3000)
# The end of the path of every stream. When an instance ends, its clients reconnect all at once and wait in a queue.
STREAM_SUFFIX = "/events"
# For how long a stream's client may read nothing, usually and while draining.
STALL_TIMEOUT = 30.0
STALL_TIMEOUT_DRAINING = 1.0
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
        self._app = with_cors(app, context.settings)
        self._context = context
        self._from_proxy = TrustedProxies(self._request, context.settings.trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        else:
            await self._from_proxy(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Exchange(self._app, self._context, scope, receive, send).run()
        else:
            await self._app(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the lifespan on; if the start-up is refused, give uvicorn the reason as its message."""
        context = self._context

        async def send_with_reason(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed" and context.start_error is not None:
                message = {**message, "message": f"refused to start: {context.start_error}"}
            await send(message)

        try:
            await self._app(scope, receive, send_with_reason)
        except FleetError as error:
            # uvicorn logs the message and exits with 3. A traceback would bury the text that says what to do.
            if error is not context.start_error:
                raise


class Exchange:
    """One request and its response."""

    # Slots, because each open stream has one of these.
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
        self._id = request_id_of(headers.get("x-request-id"))
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
        # Set for a HEAD request without its own route: the application is called again, with GET.
        self._as_get: Scope | None = None

    async def run(self) -> None:
        context = self._context
        token = request_id.set(self._id)
        if context.started:
            context.enter()
        context.in_flight += 1
        try:
            self._refuse_over_limit()
            self._check_declared_length()
            if self._scope["path"].endswith(STREAM_SUFFIX):
                await context.opening_pacer.wait()
            try:
                await self._answer()
            except ExceptionGroup as errors:
                if not (self._streams_events and is_disconnect(errors)):
                    raise
            if self._streams_events and not self._ended:
                await self._end_stream()
        except HttpError as error:
            # Refused by this middleware, before the application was called.
            if self._started:
                raise
            refusal = problem(Request(self._scope), KINDS[error.slug], error.detail, headers=error.headers)
            await with_cors(refusal, context.settings)(self._scope, self._receive, self.send)
        except ClientDisconnect:
            # Logged and counted in `receive`.
            pass
        except Exception as error:
            # The application has answered with 500. Logged here, where the request id is still known. Raised again only
            # if the response is incomplete: then the server must close the connection, and logs the error too.
            log.error("request.failed", error=error, method=self._scope["method"], path=self._scope["path"])
            if not self._ended:
                raise
        finally:
            audit.record(self._scope, self._status)
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

    # -- the request --------------------------------------------------------------------------------------------------

    def _refuse_over_limit(self) -> None:
        if self._over_limit and self._scope["path"] not in PROBES:
            self._context.connections.count("limit")
            raise Unavailable("this instance has reached its limit of connections: try again, or at another instance")

    async def receive(self) -> Message:
        if self._as_get is not None and self._ended:
            return DISCONNECT
        if self._body_read:
            return await self._disconnect_or_drain()
        if not self._received:
            await auth.check_before_body(self._scope, self._context)
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
        """Wait until the client disconnects; for a stream of events, a drain looks the same."""
        at_drain = self._context.lifecycle.at_drain
        self._listening = asyncio.timeout(None)
        at_drain.add(self._disconnect_if_draining)
        try:
            async with self._listening:
                self._disconnect_if_draining()
                return await self._receive()
        except TimeoutError:
            return DISCONNECT
        finally:
            self._listening = None
            at_drain.discard(self._disconnect_if_draining)

    def _disconnect_if_draining(self) -> None:
        """Let a stream see a disconnect if this instance drains. Called whenever one of the two may have changed."""
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
                f"the request body is larger than {limit} bytes, and nothing of it was stored: send a smaller one",
                headers={"Connection": "close"},
            )

    # -- the response -------------------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        protocol.discard_if_closed(self._send)
        if message["type"] == "http.response.start":
            self._started = True
            self._status = message["status"]
            self._set_headers(MutableHeaders(scope=message), message["status"])
            self._disconnect_if_draining()
            if self._as_get is not None:
                await self._send(message)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
                self._ended = True
        elif self._as_get is not None:
            return
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        if self._streams_events:
            await self._send_or_reset(message)
        else:
            await self._send(message)

    async def _send_or_reset(self, message: Message) -> None:
        timeout = STALL_TIMEOUT_DRAINING if self._context.lifecycle.draining.is_set() else STALL_TIMEOUT
        try:
            async with asyncio.timeout(timeout):
                await self._send(message)
        except TimeoutError:
            log.info("stream.cut", path=self._scope["path"], seconds=timeout)
            if protocol.reset_connection(self._send):
                # Returns when the server has seen the reset. Then it discards what follows, and the application sees a
                # disconnect.
                await self._receive()

    def _set_headers(self, headers: MutableHeaders, status: int) -> None:
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

    async def _end_stream(self) -> None:
        retry = random.randint(*RETRY_MS)
        await self.send({"type": "http.response.body", "body": b"retry: %d\n\n" % retry, "more_body": False})


def is_disconnect(errors: "ExceptionGroup[Exception]") -> bool:
    """Whether these are the errors that the framework raises for a stream that was disconnected while it sent."""
    return errors.split((anyio.BrokenResourceError, anyio.ClosedResourceError))[1] is None


def is_not_traced(scope: MutableMapping[str, Any]) -> bool:
    """Whether a request gets no span: probes and scrapes are many, and a stream lasts for a quarter of an hour."""
    path = scope["path"]
    return path in {*PROBES, "/metrics"} or path.endswith(STREAM_SUFFIX)


def request_id_of(given: str | None) -> str:
    return given if given and VALID_ID.fullmatch(given) else secrets.token_hex(16)
