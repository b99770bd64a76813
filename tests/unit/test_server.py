"""What is changed in uvicorn: the limits for clients, the number of open files, a client that has just left."""

import asyncio
import resource
import signal

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import Message, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.fleet.edge.context import Context
from app.fleet.edge.middleware import Edge
from app.fleet.server.connections import OTHER_FILES, SURPLUS, Connections
from app.fleet.server.process import Server
from app.settings import Settings

OTHER_USES = Settings.load().pool_max + SURPLUS + OTHER_FILES


def connections_with(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, requested: int) -> tuple[int, list[int]]:
    """Return how many connections are accepted with these limits of open files, and the values set for that limit."""
    given: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits[0]))
    connections = Connections(Settings.load(connections=requested))
    connections._fit_file_limit()
    return connections.limit, given


def test_the_limit_of_open_files_is_raised_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = resource.RLIM_INFINITY
    assert connections_with(monkeypatch, 1024, 100_000, 4096) == (4096, [4096 + OTHER_USES])
    assert connections_with(monkeypatch, 1024, infinite, 4096) == (4096, [4096 + OTHER_USES])
    assert connections_with(monkeypatch, 50_000, 100_000, 4096) == (4096, [])
    assert connections_with(monkeypatch, infinite, infinite, 4096) == (4096, [])


def test_with_too_few_open_files_allowed_fewer_connections_are_accepted_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert connections_with(monkeypatch, 1024, 1024, 4096) == (1024 - OTHER_USES, [1024])
    assert [record.message for record in caplog.records] == ["server.few_files"]
    assert connections_with(monkeypatch, 64, 64, 4096) == (16, [64])


def test_another_http_protocol_is_not_changed_and_logged_as_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = uvicorn.Config("app.main:app", http="h11", log_config=None)
    config.load()
    monkeypatch.setattr(signal, "getsignal", lambda _: uvicorn.Server(config).handle_exit)
    settings = Settings.load()
    Server().limit_clients(settings, Connections(settings), is_open=True)
    assert config.http_protocol_class is H11Protocol
    assert [record.message for record in caplog.records] == ["server.not_limited"]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.default_int_handler, "".join])
def test_without_uvicorn_as_the_server_nothing_is_changed(monkeypatch: pytest.MonkeyPatch, handler: object) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _: handler)
    settings = Settings.load()
    server, connections = Server(), Connections(settings)
    server.keep_peers()
    server.limit_clients(settings, connections, is_open=True)
    server.limit_graceful_shutdown(5)
    assert (server.port, server.reloading, server.is_stopping(), connections.open) == (None, False, False, 0)


class ClosedExchange:
    """uvicorn's side of a request whose connection uvloop has closed: uvicorn is notified later, and a write raises."""

    def __init__(self) -> None:
        self.transport = self
        self.disconnected = False

    def is_closing(self) -> bool:
        return True

    async def send(self, _: Message) -> None:
        if not self.disconnected:
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")


def test_a_response_to_a_client_that_has_just_left_is_discarded_without_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange = ClosedExchange()
    scope: Scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "state": {}}

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    edge = Edge(PlainTextResponse("done"), Context(Settings.load(), version="1"))
    asyncio.run(edge(scope, receive, exchange.send))
    assert exchange.disconnected, "uvicorn discards what follows"
    assert "request.failed" not in caplog.messages
