"""The uvicorn server that runs this process, found by its signal handler; without one, every method does nothing."""

import signal
from functools import partial

import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.fleet.server.connections import Connections
from app.fleet.server.protocol import LimitedHttpProtocol
from app.fleet.settings import FleetSettings
from app.fleet.telemetry.logs import event_log

log = event_log(__name__)

LOOPBACK = {"127.0.0.1", "::1", "localhost"}


class Server:
    def __init__(self) -> None:
        found = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        self._server = found if isinstance(found, uvicorn.Server) else None
        self._config = self._server.config if self._server is not None else None

    @property
    def runs_this_process(self) -> bool:
        """Whether the process is a uvicorn server's, and not, for example, a test's that does other things as well."""
        return self._server is not None

    @property
    def port(self) -> int | None:
        return self._config.port if self._config is not None else None

    @property
    def reloading(self) -> bool:
        """Whether `--reload` is on: no load balancer is involved, and a developer waits for the restart."""
        return self._config is not None and self._config.should_reload

    def is_stopping(self) -> bool:
        """Whether uvicorn itself has received a signal, as it does until `Signals.install`."""
        return self._server is not None and self._server.should_exit

    def limit_graceful_shutdown(self, seconds: int) -> None:
        """Limit how long uvicorn waits for requests in flight, unless its own limit (by default none) is shorter."""
        if self._config is not None:
            configured = self._config.timeout_graceful_shutdown
            self._config.timeout_graceful_shutdown = seconds if configured is None else min(seconds, configured)

    def keep_peers(self) -> None:
        """Let a request show its peer as its client, whatever its headers say (`forwarded.py` reads those)."""
        if self._config is not None and isinstance(self._config.loaded_app, ProxyHeadersMiddleware):
            self._config.loaded_app = self._config.loaded_app.app

    def limit_clients(self, settings: FleetSettings, connections: Connections, *, is_open: bool) -> None:
        """Put the limits for clients in place. Called in the event loop, before the listener is open.

        `is_open` says that every caller may do everything.
        """
        server, config = self._server, self._config
        if server is None or config is None:
            return
        if is_open and config.uds is None and config.host not in LOOPBACK:
            log.warning("server.exposed", host=config.host)
        if config.http_protocol_class is not HttpToolsProtocol:
            log.warning("server.not_limited", protocol=str(config.http))
            return
        connections.begin(server)
        config.http_protocol_class = partial(LimitedHttpProtocol, connections)  # type: ignore[assignment]  # it is called
        config.timeout_keep_alive = settings.idle_timeout  # type: ignore[assignment]  # given to `call_later` only
