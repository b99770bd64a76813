"""The limits for one client connection. uvicorn itself limits neither the size of headers nor the time a client takes.

    what a client does                                            what happens to its connection
    sends MAX_HEADER bytes without completing headers             answered with 431, closed
    sends more than MAX_HEADER_LINES headers                      answered with 431, closed
    does not complete its headers within HEADER_TIMEOUT           answered with 408 (if it has sent anything), closed
    sends no part of a body for TRANSFER_TIMEOUT, or less than    answered with 408 (if the response has not begun),
    BODY_RATE on average after that time                          closed; the application sees a disconnect
    reads nothing of a response for TRANSFER_TIMEOUT              reset
    sends more than MAX_PIPELINED requests before an answer       closed
    sends what is not HTTP                                        answered with 400, closed
    keeps a connection idle for IDLE_TIMEOUT                      closed

For one huge header the parser calls back many times, and each time it copies what it has so far. Data is therefore
counted before the parser receives it, so that the parser never holds more than MAX_HEADER undelivered bytes.
"""

import asyncio
import json
from enum import Enum, auto
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httptools
from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from app.fleet.server.connections import Connections

MAX_HEADER_LINES = 200
MAX_PIPELINED = 32
BODY_RATE = 1024
SWEEP_INTERVAL = 1.0
# The key in `scope["state"]` of requests on a connection beyond the limit.
OVER_LIMIT = "over_connection_limit"


class Stage(Enum):
    """The part of the exchange that a connection is in."""

    IDLE = auto()
    HEADERS = auto()
    BODY = auto()
    ANSWER = auto()


class Refused(Exception):
    """Raised in a callback of the parser, which stops the parser."""

    def __init__(self, reason: str, status: int, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.status, self.detail = reason, status, detail


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with limits. One object for each connection."""

    __slots__ = (
        "_all_connections", "_body_size", "_is_silent", "_last_byte", "_last_read", "_refused", "_settings", "_since",
        "_stage", "_undelivered", "_unsent", "_upgraded",
    )  # fmt: skip

    def __init__(self, all_connections: "Connections", **options: Any) -> None:
        super().__init__(**options)
        self._all_connections = all_connections
        self._settings = all_connections.settings
        # HEADER_TIMEOUT of a new connection begins now, not with its first byte.
        self._stage = Stage.HEADERS
        self._since = self._last_byte = self._last_read = self.loop.time()
        self._is_silent = True
        # Bytes given to the parser since it delivered headers or a part of a body.
        self._undelivered = 0
        self._body_size = 0
        self._unsent = 0
        self._refused: Refused | None = None
        self._upgraded = False

    # -- the transport's callbacks ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._all_connections.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._all_connections.forget(self)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._last_byte = self.loop.time()
        self._is_silent = False
        if self._stage is Stage.IDLE:
            self._stage, self._since = Stage.HEADERS, self._last_byte
        while data and not self._upgraded and not self.transport.is_closing():
            room = self._settings.max_header + 1 - self._undelivered
            piece, data = data[:room], data[room:]
            self._parse(piece)
        if self._stage is Stage.HEADERS and self in self._all_connections.idle:
            del self._all_connections.idle[self]
            self._all_connections.incomplete[self] = None

    def _parse(self, piece: bytes) -> None:
        self._undelivered += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self._unsupported_upgrade_warning()
        except httptools.HttpParserError:
            self._refuse(self._refused or Refused("malformed", 400, "this is not a valid HTTP request"))
        if self._undelivered > self._settings.max_header:
            limit = self._settings.max_header
            self._refuse(Refused("header_size", 431, f"the headers are larger than {limit} bytes: send less"))

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        self._all_connections.forget(self)
        super().handle_websocket_upgrade()

    # -- the parser's callbacks ---------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        # Also called for each trailer, after the body.
        if len(self.headers) >= MAX_HEADER_LINES:
            self._refused = Refused(
                "header_count", 431, f"the request has more than {MAX_HEADER_LINES} headers: send fewer"
            )
            raise self._refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._undelivered = 0
        self._stage, self._since, self._body_size = Stage.BODY, self._last_byte, 0
        self._all_connections.forget(self)
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self._refused = Refused(
                "pipelined", 400, f"more than {MAX_PIPELINED} requests were sent before a response: wait for responses"
            )
            raise self._refused

    def on_body(self, body: bytes) -> None:
        self._undelivered = 0
        self._body_size += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._undelivered = 0
        self._stage = Stage.ANSWER
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self._wait_for_request()

    # -- the response's callback --------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return
        if self._stage is Stage.ANSWER:
            self._wait_for_request()
        else:
            # Answered before the whole body arrived. The application does not wait for the rest.
            self._all_connections.incomplete[self] = None

    def _wait_for_request(self) -> None:
        self._stage = Stage.IDLE
        self._all_connections.forget(self)
        self._all_connections.idle[self] = None

    # -- the limits ---------------------------------------------------------------------------------------------------

    def mark_over_limit(self) -> None:
        self.app_state = {**self.app_state, OVER_LIMIT: True}

    def check(self, now: float) -> None:
        """Close this connection if its client has taken too long for what it must do next."""
        if self._reads_nothing(now):
            self.reset("stalled_read")
        elif self.transport.is_closing():
            return
        elif self._stage is Stage.HEADERS and now - self._since >= self._settings.header_timeout:
            if self._is_silent:
                self.reset("silent")
            else:
                self._refuse(Refused("slow_header", 408, "the headers did not arrive in time: send them faster"))
        elif self._stage is Stage.BODY:
            self._check_body(now)

    def _check_body(self, now: float) -> None:
        timeout = self._settings.transfer_timeout
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:
            # The application does not read; the client is not late.
            self._since += SWEEP_INTERVAL
            self._last_byte = now
        elif now - self._last_byte >= timeout or now - self._since >= timeout + self._body_size / BODY_RATE:
            self._refuse(Refused("slow_body", 408, "the body did not arrive in time: send it faster, or less at once"))

    def _reads_nothing(self, now: float) -> bool:
        """Whether bytes wait to be sent and the client has read none of them for TRANSFER_TIMEOUT."""
        unsent, before = self.transport.get_write_buffer_size(), self._unsent
        self._unsent = unsent
        # During a response, the application may have added as many bytes as the client read, unless writing is paused.
        adding = self._stage is not Stage.IDLE and not self.flow.write_paused and not self.transport.is_closing()
        if unsent == 0 or unsent < before or adding:
            self._last_read = now
        return now - self._last_read >= self._settings.transfer_timeout

    def _refuse(self, refused: Refused) -> None:
        """Close the connection, and answer with the reason unless a response to this request has begun."""
        if self.transport.is_closing():
            return
        self._all_connections.count(refused.reason)
        cycle = self.cycle
        unanswered = self._stage is Stage.BODY and not self.pipeline and not cycle.response_started
        if unanswered or self._stage is Stage.HEADERS:
            self.transport.write(problem(refused.status, refused.detail))
        if cycle is not None and not cycle.response_complete:
            # The application sees a disconnect, and what it still sends is discarded.
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def reset(self, reason: str) -> None:
        """Close the connection at once and discard what is still to be sent."""
        self._all_connections.count(reason)
        self._all_connections.forget(self)
        self.connections.discard(self)
        self.transport.abort()


def problem(status: int, detail: str) -> bytes:
    """Return a whole response in the format of all problems (`app/fleet/edge/problems.py`)."""
    phrase = HTTPStatus(status).phrase
    body = json.dumps({"type": "/problems/bad-request", "title": phrase, "status": status, "detail": detail}).encode()
    head = (
        f"HTTP/1.1 {status} {phrase}\r\n"
        f"content-type: application/problem+json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def is_over_limit(scope: Scope) -> bool:
    """Whether a request arrived on a connection beyond the limit."""
    return OVER_LIMIT in scope.get("state", {})


def discard_if_closed(send: Send) -> None:
    """Let uvicorn discard the response if the connection is closed already.

    The client has left, and uvicorn is notified in the next iteration of the event loop. A write before that raises.
    """
    exchange = getattr(send, "__self__", None)
    transport = getattr(exchange, "transport", None)
    if transport is not None and transport.is_closing():
        exchange.disconnected = True  # type: ignore[union-attr]


def reset_connection(send: Send) -> bool:
    """Close the connection of a response at once, if this is uvicorn: ASGI has no message for that."""
    abort = getattr(getattr(getattr(send, "__self__", None), "transport", None), "abort", None)
    if abort is not None:
        abort()
    return abort is not None
