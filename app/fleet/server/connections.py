"""All client connections of this process: how many may be open, and which one makes room for a new one.

At most CONNECTIONS connections are open, and fewer if the process may not open that many files. At the limit, each new
connection replaces the oldest one without a complete request. If all have a complete request, up to `SURPLUS` more are
accepted, and the edge answers them with 503 unless they request `/health/live` or `/health/ready`. So probes are
answered whatever clients do.
"""

import asyncio
import resource
from collections import Counter, OrderedDict

import uvicorn

from app.fleet.server.protocol import SWEEP_INTERVAL, LimitedHttpProtocol
from app.fleet.settings import FleetSettings
from app.fleet.telemetry.logs import event_log

log = event_log(__name__)

# Connections beyond the limit that are accepted, so that probes get one.
SURPLUS = 64
# Files that the process needs beside connections and the pool: listener, logs, database sessions, modules.
OTHER_FILES = 64
MIN_CONNECTIONS = 16
REPORT_INTERVAL = 60.0
# Why a connection is closed.
REASONS = (
    "header_size", "header_count", "slow_header", "silent", "slow_body", "stalled_read", "pipelined", "malformed",
    "limit",
)  # fmt: skip


class Connections:
    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.limit = settings.connections
        # The number of connections that were closed, by reason.
        self.closed: Counter[str] = Counter()
        # Connections without a complete request, oldest first: `incomplete` are new ones and those in the middle of a
        # request, `idle` have had a response and sent nothing since.
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

    def admit(self, new: LimitedHttpProtocol) -> None:
        """Make room for a new connection, or mark it as one beyond the limit."""
        self._accepted = True
        if self.open > self.limit and not self._close_oldest():
            new.mark_over_limit()
            if self.open > self.limit + SURPLUS:
                new.reset("limit")
                return
        self.incomplete[new] = None

    def were_accepted(self) -> bool:
        """Whether a connection was accepted since the last call."""
        accepted, self._accepted = self._accepted, False
        return accepted

    def forget(self, connection: LimitedHttpProtocol) -> None:
        """Remove a connection from the lists of those without a complete request."""
        self.incomplete.pop(connection, None)
        self.idle.pop(connection, None)

    def count(self, reason: str) -> None:
        """Count a closed connection; log the reason at once, and then once a minute."""
        self.closed[reason] += 1
        self._unreported[reason] += 1
        self._report(reason)

    def _close_oldest(self) -> bool:
        """Close the oldest connection of the longer list, so that a flood of one kind displaces only that kind."""
        longer = max(self.incomplete, self.idle, key=len)
        if not longer:
            return False
        next(iter(longer)).reset("limit")
        return True

    def _fit_file_limit(self) -> None:
        """Raise the limit of open files as far as needed and allowed; if it stays too low, accept fewer connections."""
        other_files = self.settings.pool_max + SURPLUS + OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = self.settings.connections + other_files
        if resource.RLIM_INFINITY != soft < needed:
            soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if resource.RLIM_INFINITY != soft < needed:
            self.limit = max(MIN_CONNECTIONS, soft - other_files)
            log.warning("server.few_files", connections=self.limit, configured=self.settings.connections, files=soft)

    def _sweep_later(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(SWEEP_INTERVAL, self._sweep, loop.time() + SWEEP_INTERVAL)

    def _sweep(self, due: float) -> None:
        """Check every connection; every `SWEEP_INTERVAL`, for as long as the event loop runs."""
        now = asyncio.get_running_loop().time()
        # If the event loop was blocked, what clients sent meanwhile is read first.
        if self._server is not None and now < due + SWEEP_INTERVAL:
            for connection in list(self._server.server_state.connections):
                if isinstance(connection, LimitedHttpProtocol):
                    connection.check(now)
        for reason in self._unreported:
            self._report(reason)
        self._sweep_later()

    def _report(self, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._unreported[reason] and now - self._reported.get(reason, -REPORT_INTERVAL) >= REPORT_INTERVAL:
            self._reported[reason] = now
            log.info("connections.closed", reason=reason, connections=self._unreported[reason])
            self._unreported[reason] = 0
