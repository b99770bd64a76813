"""uvicorn's internals, all of them in this file: which server runs us, and what its clients may do to it.

uvicorn installs its signal handler before it runs the lifespan, so during start-up the handler's `__self__` is the
server. It reads the class of its HTTP protocol from its configuration when a connection is accepted, and opens its
listener after start-up, so a class that start-up puts there serves every connection. This is the same under plain
`uvicorn app.main:app`, in each process of `--workers N`, and under `flotilla serve`.

uvicorn itself limits neither the size of a request's headers nor the time a client takes. `LimitedHttpProtocol` does:

    what a client does                                            what happens to its connection
    sends MAX_HEADER bytes without completing headers             answered with 431, closed
    sends more than HEADER_LINES headers                          answered with 431, closed
    does not complete its headers within HEADER_TIMEOUT           answered with 408 (if it has sent anything), closed
    sends no part of a body for TRANSFER_TIMEOUT, or less than    answered with 408 (if the response has not begun),
    BODY_RATE on average after that time                          closed; the application sees that the client left
    takes nothing of a response for TRANSFER_TIMEOUT              reset
    sends more than PIPELINED requests before an answer           closed
    sends what is not HTTP                                        answered with 400, closed
    keeps a connection idle for IDLE_TIMEOUT                      closed

At most CONNECTIONS connections are open, and fewer where the process may not open so many files. At the limit, each new
connection takes the place of the oldest one that has no complete request. Where all connections have one, up to
`SURPLUS` more are accepted, and the edge answers them with 503 unless they ask for `/health/live` or `/health/ready`.
So probes are answered whatever clients do.

The parser calls back many times for one huge header, and each time copies what it has. Data is therefore counted
before the parser sees it, and the parser never holds more than MAX_HEADER bytes that it has not delivered.

Not limited: any other server, and uvicorn with `--http h11` (whose parser has a limit for headers of its own) or
another protocol; the log then has `server.not_limited`. Connections that were upgraded to WebSockets count, and have
uvicorn's own limits.
"""

import asyncio
import json
import resource
import signal
from collections import Counter, OrderedDict
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.fleet.settings import FleetSettings
from app.fleet.telemetry.logs import events

log = events(__name__)

HEADER_LINES = 200
PIPELINED = 32
BODY_RATE = 1024
# How many connections beyond the limit are accepted, so that probes find one.
SURPLUS = 64
# How many files the process needs beside connections and the pool: listener, logs, database sessions, modules.
OTHER_FILES = 64
FEWEST = 16
SWEEP = 1.0
REPORT_EVERY = 60.0
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
# Why a connection is closed.
REASONS = (
    "header_size", "header_count", "slow_header", "silent", "slow_body", "stalled_read", "pipelined", "malformed",
    "limit",
)  # fmt: skip
# The key in `scope["state"]` of requests on a connection beyond the limit.
OVER_LIMIT = "over_connection_limit"


class Server:
    """The uvicorn server that runs this process, if one does."""

    def __init__(self) -> None:
        found = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        self._server = found if isinstance(found, uvicorn.Server) else None
        self._config = self._server.config if self._server is not None else None

    @property
    def runs_this_process(self) -> bool:
        """Whether the process is a server's, and not a test's, say, that runs the service beside other things."""
        return self._server is not None

    @property
    def port(self) -> int | None:
        return self._config.port if self._config is not None else None

    @property
    def reloading(self) -> bool:
        """Whether `--reload` is on: no load balancer has to notice, and a developer waits."""
        return self._config is not None and self._config.should_reload

    def was_told(self) -> bool:
        """Whether the server has received a signal itself, as it does until `Signals.install`."""
        return self._server is not None and self._server.should_exit

    def bound_patience(self, ours: int) -> None:
        """Give uvicorn our limit for requests in flight: it has none by itself, and a longer one would not be kept."""
        if self._config is not None:
            theirs = self._config.timeout_graceful_shutdown
            self._config.timeout_graceful_shutdown = ours if theirs is None else min(ours, theirs)

    def open_to_clients(self, settings: FleetSettings, connections: "Connections") -> None:
        """Put the limits in place. Called in the event loop, before the listener is open."""
        server, config = self._server, self._config
        if server is None or config is None:
            return
        if not settings.api_keys and config.uds is None and config.host not in LOOPBACK:
            log.warning("server.exposed", host=config.host)
        if config.http_protocol_class is not HttpToolsProtocol:
            log.warning("server.not_limited", protocol=str(config.http))
            return
        connections.begin(server)
        config.http_protocol_class = partial(LimitedHttpProtocol, connections)  # type: ignore[assignment]  # it is called
        config.timeout_keep_alive = settings.idle_timeout  # type: ignore[assignment]  # given to `call_later` only


class Connections:
    """All client connections of this process: their limits, and how many were closed for which reason."""

    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.limit = settings.connections
        # How many connections were closed, by reason.
        self.closed: Counter[str] = Counter()
        # Connections without a complete request, oldest first: those that have begun one or are new, and idle ones.
        self.incomplete: OrderedDict[LimitedHttpProtocol, None] = OrderedDict()
        self.idle: OrderedDict[LimitedHttpProtocol, None] = OrderedDict()
        self._accepted = False
        self._server: uvicorn.Server | None = None
        self._unreported: Counter[str] = Counter()
        self._reported: dict[str, float] = {}

    @property
    def open(self) -> int:
        return len(self._server.server_state.connections) if self._server is not None else 0

    def begin(self, server: uvicorn.Server) -> None:
        self._server = server
        self._fit_file_limit()
        self._sweep_later()

    def admit(self, new: "LimitedHttpProtocol") -> None:
        """Make room for a new connection, or mark it as one beyond the limit."""
        self._accepted = True
        if self.open > self.limit and not self._close_oldest():
            new.is_over_limit()
            if self.open > self.limit + SURPLUS:
                new.reset("limit")
                return
        self.incomplete[new] = None

    def were_accepted(self) -> bool:
        """Whether a connection was accepted since this was asked last."""
        accepted, self._accepted = self._accepted, False
        return accepted

    def forget(self, connection: "LimitedHttpProtocol") -> None:
        """Take a connection off the lists of those without a complete request."""
        self.incomplete.pop(connection, None)
        self.idle.pop(connection, None)

    def count(self, reason: str) -> None:
        """Count a connection that was closed; log the reason at once, and then once a minute."""
        self.closed[reason] += 1
        self._unreported[reason] += 1
        self._report(reason)

    def _close_oldest(self) -> bool:
        """Close the oldest connection of the longer list: a flood of either kind displaces its own."""
        longer = max(self.incomplete, self.idle, key=len)
        if not longer:
            return False
        next(iter(longer)).reset("limit")
        return True

    def _fit_file_limit(self) -> None:
        """Raise the limit of open files as far as needed and allowed, and stay below it."""
        beside = self.settings.pool_max + SURPLUS + OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.settings.connections + beside
        if resource.RLIM_INFINITY != soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if resource.RLIM_INFINITY != soft < wanted:
            self.limit = max(FEWEST, soft - beside)
            log.warning("server.few_files", connections=self.limit, wanted=self.settings.connections, files=soft)

    def _sweep_later(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(SWEEP, self._sweep, loop.time() + SWEEP)

    def _sweep(self, due: float) -> None:
        """Look at every connection, again and again, for as long as the loop runs."""
        now = asyncio.get_running_loop().time()
        # If the loop was blocked, what clients sent meanwhile is read first.
        if self._server is not None and now < due + SWEEP:
            for connection in list(self._server.server_state.connections):
                if isinstance(connection, LimitedHttpProtocol):
                    connection.check(now)
        for reason in self._unreported:
            self._report(reason)
        self._sweep_later()

    def _report(self, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._unreported[reason] and now - self._reported.get(reason, -REPORT_EVERY) >= REPORT_EVERY:
            self._reported[reason] = now
            log.info("connections.closed", reason=reason, connections=self._unreported[reason])
            self._unreported[reason] = 0


class Stage(Enum):
    IDLE = auto()
    HEADERS = auto()
    BODY = auto()
    ANSWER = auto()


class Refused(Exception):
    """Raised in a callback of the parser, which stops it."""

    def __init__(self, reason: str, status: int, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.status, self.detail = reason, status, detail


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits. One object for each connection."""

    __slots__ = (
        "_body_size", "_is_silent", "_last_byte", "_last_taken", "_refused", "_settings", "_shared", "_since", "_stage",
        "_undelivered", "_unsent", "_upgraded",
    )  # fmt: skip

    def __init__(self, shared: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._shared = shared
        self._settings = shared.settings
        # A new connection has as long for its first request as it would have after its first byte.
        self._stage = Stage.HEADERS
        self._since = self._last_byte = self._last_taken = self.loop.time()
        self._is_silent = True
        # Bytes given to the parser since it last delivered headers or a part of a body.
        self._undelivered = 0
        self._body_size = 0
        self._unsent = 0
        self._refused: Refused | None = None
        self._upgraded = False

    # -- the transport's callbacks ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._shared.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._shared.forget(self)

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
        if self._stage is Stage.HEADERS and self in self._shared.idle:
            del self._shared.idle[self]
            self._shared.incomplete[self] = None

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
            self._refuse(Refused("header_size", 431, f"the request's headers are larger than {limit} bytes"))

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        self._shared.forget(self)
        super().handle_websocket_upgrade()

    # -- the parser's callbacks ---------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        # Also called for each trailer, after the body.
        if len(self.headers) >= HEADER_LINES:
            self._refused = Refused("header_count", 431, f"the request has more than {HEADER_LINES} headers")
            raise self._refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._undelivered = 0
        self._stage, self._since, self._body_size = Stage.BODY, self._last_byte, 0
        self._shared.forget(self)
        super().on_headers_complete()
        if len(self.pipeline) > PIPELINED:
            self._refused = Refused("pipelined", 400, f"more than {PIPELINED} requests were sent before an answer")
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
            # Answered before its body was there. Nobody waits for the rest.
            self._shared.incomplete[self] = None

    def _wait_for_request(self) -> None:
        self._stage = Stage.IDLE
        self._shared.forget(self)
        self._shared.idle[self] = None

    # -- the limits ---------------------------------------------------------------------------------------------------

    def is_over_limit(self) -> None:
        self.app_state = {**self.app_state, OVER_LIMIT: True}

    def check(self, now: float) -> None:
        """Close this connection if its client has taken too long for what it has to do next."""
        if self._takes_nothing(now):
            self.reset("stalled_read")
        elif self.transport.is_closing():
            return
        elif self._stage is Stage.HEADERS and now - self._since >= self._settings.header_timeout:
            if self._is_silent:
                self.reset("silent")
            else:
                self._refuse(Refused("slow_header", 408, "the request's headers did not arrive in time"))
        elif self._stage is Stage.BODY:
            self._check_body(now)

    def _check_body(self, now: float) -> None:
        timeout = self._settings.transfer_timeout
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:
            # It is the application that does not read.
            self._since += SWEEP
            self._last_byte = now
        elif now - self._last_byte >= timeout or now - self._since >= timeout + self._body_size / BODY_RATE:
            self._refuse(Refused("slow_body", 408, "the request's body did not arrive in time"))

    def _takes_nothing(self, now: float) -> bool:
        """Whether something waits to be sent, and the client has taken nothing of it for too long."""
        unsent, before = self.transport.get_write_buffer_size(), self._unsent
        self._unsent = unsent
        # In the middle of an answer the application may have added as much as was taken, unless it is held back.
        adding = self._stage is not Stage.IDLE and not self.flow.write_paused and not self.transport.is_closing()
        if unsent == 0 or unsent < before or adding:
            self._last_taken = now
        return now - self._last_taken >= self._settings.transfer_timeout

    def _refuse(self, refused: Refused) -> None:
        """Answer with the reason, if nothing has answered this request yet, and close the connection."""
        if self.transport.is_closing():
            return
        self._shared.count(refused.reason)
        cycle = self.cycle
        begun = self._stage is Stage.BODY and not self.pipeline and not cycle.response_started
        if begun or self._stage is Stage.HEADERS:
            self.transport.write(problem(refused.status, refused.detail))
        if cycle is not None and not cycle.response_complete:
            # What the application still sends goes nowhere, and it sees that the client has left.
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def reset(self, reason: str) -> None:
        """End the connection at once, whatever is still to be sent."""
        self._shared.count(reason)
        self._shared.forget(self)
        self.connections.discard(self)
        self.transport.abort()


def problem(status: int, detail: str) -> bytes:
    """Write a whole answer in the shape that all problems have (`http/problems.py`)."""
    phrase = HTTPStatus(status).phrase
    body = json.dumps({"type": "/problems/bad-request", "title": phrase, "status": status, "detail": detail}).encode()
    head = (
        f"HTTP/1.1 {status} {phrase}\r\n"
        f"content-type: application/problem+json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def is_over_limit(scope: Scope) -> bool:
    """Whether a request came on a connection beyond the limit."""
    return OVER_LIMIT in scope.get("state", {})


def reset(send: Send) -> bool:
    """End the connection of a response at once, if we can: ASGI has no message for that, uvicorn's objects do."""
    abort = getattr(getattr(getattr(send, "__self__", None), "transport", None), "abort", None)
    if abort is not None:
        abort()
    return abort is not None
