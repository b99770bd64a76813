"""The limits for TCP clients: each limit closes the connection that exceeds it, and no other."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fleet import NO_TRUST, Fleet, InstanceProcess, Mode
from tests.support.postgres import Postgres, eventually

QUICK = {"FLOTILLA_HEADER_TIMEOUT": "2", "FLOTILLA_TRANSFER_TIMEOUT": "2", "FLOTILLA_IDLE_TIMEOUT": "3"}
LIVE = b"GET /health/live HTTP/1.1\r\nHost: service\r\n"


@pytest.fixture(scope="module")
def fleet_of_module(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    own = postgres.new_migrated_database()
    with Fleet(own, tmp_path_factory.mktemp("instance")) as fleet:
        yield fleet
    postgres.drop(own)


@pytest.fixture(scope="module")
def instance(fleet_of_module: Fleet) -> InstanceProcess:
    """One instance for all tests that check only their own connections. On a busy machine, no request times out."""
    return fleet_of_module.start()[0]


@pytest.fixture(scope="module")
def hasty_instance(fleet_of_module: Fleet) -> InstanceProcess:
    """One instance for all tests of the timeouts."""
    return fleet_of_module.start(1, "serve", **QUICK)[0]


def connect(instance: InstanceProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", instance.port), timeout=20)


def send_and_read(instance: InstanceProcess, *pieces: bytes) -> tuple[int | None, dict[str, Any]]:
    """Send data on a new connection, and read until it is closed; return the status and the body of a problem."""
    with connect(instance) as client:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                client.sendall(piece)
        return read_response(client)


def read_response(client: socket.socket) -> tuple[int | None, dict[str, Any]]:
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    found = re.match(rb"HTTP/1.1 (\d+) ", head)
    return (int(found[1]) if found else None), (json.loads(body) if b"problem+json" in head else {})


def is_alive_on(client: socket.socket) -> bool:
    """Send a request on this connection, check its response, and leave the connection open."""
    client.sendall(LIVE + b"\r\n")
    received = b""
    while not received.endswith(b'{"status":"alive"}'):
        piece = client.recv(65536)
        assert piece, received
        received += piece
    return received.startswith(b"HTTP/1.1 200")


def count_closed(instance: InstanceProcess, reason: str) -> float:
    """Return how many connections the instance has closed for this reason."""
    pattern = rf'^flotilla_connections_closed_total\{{reason="{reason}"\}} (\S+)$'
    found = re.search(pattern, instance.client.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


# -- headers ----------------------------------------------------------------------------------------------------------

TOO_LARGE = {
    "one header": [LIVE, b"X-A: ", *[b"a" * 8192] * 9, b"\r\n\r\n"],
    "many headers": [LIVE, *[b"X-A: %s\r\n" % (b"a" * 4096)] * 17, b"\r\n"],
    "request line": [b"GET /", *[b"a" * 8192] * 9, b" HTTP/1.1\r\nHost: service\r\n\r\n"],
    "never complete": [LIVE, *[b"X-A: %s\r\n" % (b"a" * 65000)] * 200],
    "trailers": [
        b"POST /trial/parcels HTTP/1.1\r\nHost: service\r\nContent-Type: application/json\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n",
        *[b"X-A: %s\r\n" % (b"a" * 65000)] * 200,
    ],
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_headers_that_are_too_large_are_answered_with_431(instance: InstanceProcess, what: str) -> None:
    before = count_closed(instance, "header_size")
    status, body = send_and_read(instance, *TOO_LARGE[what])
    assert (status, body["status"]) == (431, 431)
    assert "65536 bytes" in body["detail"]
    assert count_closed(instance, "header_size") == before + 1


@pytest.mark.parametrize("count", [199, 201])
def test_a_request_may_have_200_headers(instance: InstanceProcess, count: int) -> None:
    lines = [b"X-%d: a\r\n" % number for number in range(count - 2)]
    status, _ = send_and_read(instance, LIVE, b"Connection: close\r\n", *lines, b"\r\n")
    assert status == (200 if count < 200 else 431)


def test_headers_below_the_limit_are_accepted_in_any_pieces_and_with_a_large_body(instance: InstanceProcess) -> None:
    head = LIVE + b"Connection: close\r\nX-A: %s\r\n\r\n" % (b"a" * 60_000)
    for size in (len(head), 1000):
        assert send_and_read(instance, *[head[at : at + size] for at in range(0, len(head), size)])[0] == 200
    body = json.dumps({"weight": 3, "label": "a" * 900_000}).encode()
    post = b"POST /trial/parcels HTTP/1.1\r\nHost: service\r\nConnection: close\r\nContent-Type: application/json\r\n"
    assert send_and_read(instance, post + b"Content-Length: %d\r\n\r\n" % len(body) + body)[0] == 200


def test_data_that_is_not_http_is_answered_with_400_and_logged_once(instance: InstanceProcess) -> None:
    for _ in range(20):
        status, body = send_and_read(instance, b"\x16\x03\x01 is what TLS begins with\r\n\r\n")
        assert (status, body["status"]) == (400, 400)
    assert len([line for line in instance.lines("connections.closed") if line["reason"] == "malformed"]) == 1
    assert "Invalid HTTP request" not in instance.text


# -- timeouts ---------------------------------------------------------------------------------------------------------


def test_a_silent_connection_is_closed_and_incomplete_headers_are_answered_with_408(
    hasty_instance: InstanceProcess,
) -> None:
    assert send_and_read(hasty_instance) == (None, {})
    assert send_and_read(hasty_instance, LIVE)[1]["status"] == 408


def test_the_header_timeout_applies_to_later_requests_of_a_connection_too(hasty_instance: InstanceProcess) -> None:
    with connect(hasty_instance) as client:
        assert is_alive_on(client)
        client.sendall(LIVE)
        assert read_response(client)[1]["status"] == 408
        before = count_closed(hasty_instance, "slow_header")
    with connect(hasty_instance) as client:
        assert is_alive_on(client)
        # The client sends nothing more: the connection is idle, and is closed without a response.
        assert client.recv(65536) == b""
    assert count_closed(hasty_instance, "slow_header") == before


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_request_whose_body_stops_or_is_too_slow_is_answered_with_408(
    hasty_instance: InstanceProcess, is_slow: bool
) -> None:
    before = count_closed(hasty_instance, "slow_body")
    with connect(hasty_instance) as client:
        client.sendall(b"POST /trial/parcels HTTP/1.1\r\nHost: service\r\nContent-Type: application/json\r\n")
        client.sendall(b'Content-Length: 1000\r\n\r\n{"weight": 3, ')
        client.settimeout(0.5)
        received = b""
        while not received:
            if is_slow:
                client.sendall(b" ")
            # The client sends a byte more often than the timeout for silence.
            with contextlib.suppress(TimeoutError):
                received = client.recv(65536)
        assert received.startswith(b"HTTP/1.1 408 ")
    assert count_closed(hasty_instance, "slow_body") == before + 1


def test_a_slow_body_that_is_fast_enough_is_read(hasty_instance: InstanceProcess) -> None:
    body = b'{"weight": 3, "label": "%s"}' % (b"a" * 9_000)
    with connect(hasty_instance) as client:
        client.sendall(b"POST /trial/parcels HTTP/1.1\r\nHost: service\r\nConnection: close\r\n")
        client.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 1500):
            client.sendall(body[at : at + 1500])
            # All pauses together are longer than the timeout for silence.
            time.sleep(0.5)
        assert read_response(client)[0] == 200


def test_a_request_may_take_longer_than_the_timeouts_of_the_connection(hasty_instance: InstanceProcess) -> None:
    with httpx.Client(base_url=hasty_instance.url, verify=NO_TRUST, timeout=30) as client:
        assert client.get("/trial/slow?seconds=4").status_code == 200


@pytest.mark.parametrize("how", ["whole", "pieces"])
def test_the_connection_of_a_client_that_does_not_read_its_response_is_reset(
    hasty_instance: InstanceProcess, how: str
) -> None:
    before = count_closed(hasty_instance, "stalled_read")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", hasty_instance.port))
        client.sendall(b"GET /trial/large?megabytes=20&how=%s HTTP/1.1\r\nHost: service\r\n\r\n" % how.encode())
        eventually(lambda: count_closed(hasty_instance, "stalled_read") == before + 1)


def test_a_client_that_reads_its_response_slowly_receives_all_of_it(hasty_instance: InstanceProcess) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.connect(("127.0.0.1", hasty_instance.port))
        client.sendall(b"GET /trial/large?megabytes=8&how=whole HTTP/1.1\r\nHost: service\r\nConnection: close\r\n\r\n")
        received = 0
        while piece := client.recv(1 << 20, socket.MSG_WAITALL):
            received += len(piece)
            # All pauses together are longer than the timeout for a client that does not read.
            time.sleep(0.5)
    assert received > 8 << 20


# -- many requests ----------------------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order_up_to_a_limit(instance: InstanceProcess) -> None:
    with connect(instance) as client:
        client.sendall((LIVE + b"\r\n") * 20 + LIVE + b"Connection: close\r\n\r\n")
        received = b""
        while piece := client.recv(65536):
            received += piece
    assert received.count(b"HTTP/1.1 200") == 21
    before = count_closed(instance, "pipelined")
    send_and_read(instance, b"GET /trial/slow?seconds=1 HTTP/1.1\r\nHost: service\r\n\r\n" * 3000)
    assert count_closed(instance, "pipelined") == before + 1


def test_a_client_that_leaves_within_a_body_is_logged_in_one_line_without_a_traceback(
    instance: InstanceProcess,
) -> None:
    def abandoned() -> float:
        found = re.search(
            r"^flotilla_requests_abandoned_total (\S+)$", instance.client.get("/metrics").text, re.MULTILINE
        )
        assert found is not None
        return float(found[1])

    before, lines = abandoned(), len(instance.lines("request.abandoned"))
    for path in (b"/actions/a/runs", b"/runs:batch", b"/trial/parcels", b"/trial/raw") * 25:
        with connect(instance) as client:
            client.sendall(b"POST %s HTTP/1.1\r\nHost: service\r\nContent-Type: application/json\r\n" % path)
            client.sendall(b"Content-Length: 1000\r\n\r\n{")
    eventually(lambda: abandoned() == before + 100)
    assert len(instance.lines("request.abandoned")) == lines + 100
    assert instance.errors() == []


def test_an_unsupported_websocket_is_refused_and_its_connection_closed(instance: InstanceProcess) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    with connect(instance) as client:
        client.sendall(LIVE + upgrade + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 403")
        assert client.recv(65536) == b""


@pytest.mark.parametrize("mode", ["serve", "uvicorn", "workers"])
def test_the_limits_apply_however_the_service_is_started(fleet: Fleet, mode: Mode) -> None:
    instance = fleet.start(1, mode, **QUICK)[0]
    assert send_and_read(instance, *TOO_LARGE["one header"])[0] == 431
    assert send_and_read(instance, LIVE)[0] == 408


# -- the number of connections ----------------------------------------------------------------------------------------

LIMIT = 24


@pytest.fixture
def limited_instance(address: str, tmp_path: Path) -> Iterator[InstanceProcess]:
    with Fleet(address, tmp_path, FLOTILLA_CONNECTIONS=str(LIMIT)) as fleet:
        yield fleet.start()[0]


@pytest.mark.parametrize("sent", [b"", b"GET /health"], ids=["silent", "dribbling"])
def test_many_idle_connections_displace_no_connection_with_a_request(
    limited_instance: InstanceProcess, sent: bytes
) -> None:
    with ExitStack() as stack, connect(limited_instance) as busy:
        busy.sendall(LIVE.replace(b"/health/live", b"/trial/slow?seconds=2") + b"Connection: close\r\n\r\n")
        for _ in range(10 * LIMIT):
            client = stack.enter_context(connect(limited_instance))
            client.sendall(sent)
        for path in ("/health/live", "/health/ready", "/actions"):
            assert limited_instance.status(path) == 200
        assert read_response(busy)[0] == 200
        assert count_closed(limited_instance, "limit") >= 9 * LIMIT
    # Kept-alive connections displace each other too.
    with ExitStack() as stack:
        for _ in range(3 * LIMIT):
            assert is_alive_on(stack.enter_context(connect(limited_instance)))


def test_with_all_connections_busy_requests_are_answered_with_503_and_probes_normally(
    limited_instance: InstanceProcess,
) -> None:
    slow = b"GET /trial/slow?seconds=600 HTTP/1.1\r\nHost: service\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(LIMIT):
            stack.enter_context(connect(limited_instance)).sendall(slow)
        eventually(lambda: limited_instance.status("/actions") == 503)
        for _ in range(3):
            refused = httpx.get(limited_instance.url + "/actions", verify=NO_TRUST)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert refused.json()["type"] == "/problems/unavailable"
            assert [limited_instance.status(f"/health/{probe}") for probe in ("live", "ready")] == [200, 200]
        # With many more connections, no request is disturbed, and probes are answered.
        for _ in range(300):
            stack.enter_context(connect(limited_instance))
        assert [limited_instance.status(f"/health/{probe}") for probe in ("live", "ready")] == [200, 200]
    eventually(lambda: limited_instance.status("/actions") == 200)


def test_streams_leave_room_for_other_requests(limited_instance: InstanceProcess) -> None:
    with ExitStack() as stack:
        for _ in range(LIMIT * 3 // 4):
            client = stack.enter_context(connect(limited_instance))
            client.sendall(b"GET /events HTTP/1.1\r\nHost: service\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        assert limited_instance.status("/events") == 503
        assert limited_instance.status("/actions") == 200


def test_probes_are_answered_with_more_clients_than_open_files_are_allowed(fleet: Fleet) -> None:
    instance = fleet.start(1, TRIAL_FILES="300")[0]
    (line,) = instance.lines("server.few_files")
    assert line["connections"] < line["files"] == 300
    with ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(connect(instance))
        assert [instance.status(path) for path in ("/health/live", "/health/ready", "/actions")] == [200] * 3
    assert instance.me()["state"] == "ready"


# -- addresses --------------------------------------------------------------------------------------------------------


def test_without_api_keys_and_host_only_this_machine_can_connect(instance: InstanceProcess) -> None:
    # All addresses of 127.0.0.0/8 are this machine; a service on all interfaces would accept connections at each.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", instance.port), timeout=5)
    assert instance.lines("server.exposed") == []


def test_a_public_host_is_accepted_and_without_api_keys_logged_as_a_warning(fleet: Fleet) -> None:
    everywhere = "0.0.0.0"  # noqa: S104 — what is tested
    line = f"me:admin:{'0' * 64}"
    without, with_keys = (
        fleet.start(1, FLOTILLA_HOST=everywhere)[0],
        fleet.launch(FLOTILLA_HOST=everywhere, FLOTILLA_API_KEYS=line).wait_ready(),
    )
    assert [each["host"] for each in without.lines("server.exposed")] == [everywhere]
    assert with_keys.lines("server.exposed") == []
    socket.create_connection(("127.0.0.2", without.port), timeout=5).close()
