"""What a client may do over TCP: each limit closes the connection that goes beyond it, and no other."""

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
def instance(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstanceProcess]:
    """One instance for all tests that only look at their own connections."""
    own = postgres.new_migrated_database()
    with Fleet(own, tmp_path_factory.mktemp("instance"), **QUICK) as fleet:
        yield fleet.start()[0]
    postgres.drop(own)


def connect(instance: InstanceProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", instance.port), timeout=20)


def ask(instance: InstanceProcess, *pieces: bytes) -> tuple[int | None, dict[str, Any]]:
    """Send this on a connection of its own, and read until the server closes it: the status, and a problem's body."""
    with connect(instance) as client:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                client.sendall(piece)
        return answer_on(client)


def answer_on(client: socket.socket) -> tuple[int | None, dict[str, Any]]:
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    found = re.match(rb"HTTP/1.1 (\d+) ", head)
    return (int(found[1]) if found else None), (json.loads(body) if b"problem+json" in head else {})


def is_alive_on(client: socket.socket) -> bool:
    """Have this connection answer a request, and leave it open."""
    client.sendall(LIVE + b"\r\n")
    received = b""
    while not received.endswith(b'{"status":"alive"}'):
        piece = client.recv(65536)
        assert piece, received
        received += piece
    return received.startswith(b"HTTP/1.1 200")


def closed(instance: InstanceProcess, reason: str) -> float:
    """How many connections the instance has closed for this reason."""
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
    before = closed(instance, "header_size")
    status, body = ask(instance, *TOO_LARGE[what])
    assert (status, body["status"]) == (431, 431)
    assert "65536 bytes" in body["detail"]
    assert closed(instance, "header_size") == before + 1


@pytest.mark.parametrize("count", [199, 201])
def test_a_request_may_have_200_headers(instance: InstanceProcess, count: int) -> None:
    lines = [b"X-%d: a\r\n" % number for number in range(count - 2)]
    status, _ = ask(instance, LIVE, b"Connection: close\r\n", *lines, b"\r\n")
    assert status == (200 if count < 200 else 431)


def test_headers_below_the_limit_pass_however_they_are_cut_and_whatever_body_follows(instance: InstanceProcess) -> None:
    head = LIVE + b"Connection: close\r\nX-A: %s\r\n\r\n" % (b"a" * 60_000)
    for size in (len(head), 1000):
        assert ask(instance, *[head[at : at + size] for at in range(0, len(head), size)])[0] == 200
    body = json.dumps({"weight": 3, "label": "a" * 900_000}).encode()
    post = b"POST /trial/parcels HTTP/1.1\r\nHost: service\r\nConnection: close\r\nContent-Type: application/json\r\n"
    assert ask(instance, post + b"Content-Length: %d\r\n\r\n" % len(body) + body)[0] == 200


def test_what_is_not_http_is_a_problem_and_no_line_for_each(instance: InstanceProcess) -> None:
    for _ in range(20):
        status, body = ask(instance, b"\x16\x03\x01 is what TLS begins with\r\n\r\n")
        assert (status, body["status"]) == (400, 400)
    assert len([line for line in instance.lines("connections.closed") if line["reason"] == "malformed"]) == 1
    assert "Invalid HTTP request" not in instance.text


# -- time -------------------------------------------------------------------------------------------------------------


def test_a_silent_client_is_closed_and_one_in_the_middle_of_its_headers_is_told_why(instance: InstanceProcess) -> None:
    assert ask(instance) == (None, {})
    assert ask(instance, LIVE)[1]["status"] == 408


def test_time_runs_for_the_next_request_of_a_connection_too(instance: InstanceProcess) -> None:
    with connect(instance) as client:
        assert is_alive_on(client)
        client.sendall(LIVE)
        assert answer_on(client)[1]["status"] == 408
        before = closed(instance, "slow_header")
    with connect(instance) as client:
        assert is_alive_on(client)
        # Nothing more: it is idle, and closed without a word.
        assert client.recv(65536) == b""
    assert closed(instance, "slow_header") == before


@pytest.mark.parametrize("dribbles", [False, True])
def test_a_body_that_stops_or_dribbles_is_given_up_and_its_request_does_nothing(
    instance: InstanceProcess, dribbles: bool
) -> None:
    before = closed(instance, "slow_body")
    with connect(instance) as client:
        client.sendall(b"POST /trial/parcels HTTP/1.1\r\nHost: service\r\nContent-Type: application/json\r\n")
        client.sendall(b'Content-Length: 1000\r\n\r\n{"weight": 3, ')
        client.settimeout(0.5)
        received = b""
        while not received:
            if dribbles:
                client.sendall(b" ")
            # The pace at which it dribbles, which is more often than the limit for silence.
            with contextlib.suppress(TimeoutError):
                received = client.recv(65536)
        assert received.startswith(b"HTTP/1.1 408 ")
    assert closed(instance, "slow_body") == before + 1


def test_a_body_that_is_slow_and_fast_enough_is_read(instance: InstanceProcess) -> None:
    body = b'{"weight": 3, "label": "%s"}' % (b"a" * 9_000)
    with connect(instance) as client:
        client.sendall(b"POST /trial/parcels HTTP/1.1\r\nHost: service\r\nConnection: close\r\n")
        client.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 1500):
            client.sendall(body[at : at + 1500])
            # Longer, all together, than nothing may come.
            time.sleep(0.5)
        assert answer_on(client)[0] == 200


def test_a_request_that_takes_long_costs_its_client_nothing(instance: InstanceProcess) -> None:
    with httpx.Client(base_url=instance.url, verify=NO_TRUST, timeout=30) as client:
        assert client.get("/trial/slow?seconds=4").status_code == 200


@pytest.mark.parametrize("how", ["whole", "pieces"])
def test_a_client_that_does_not_read_its_answer_is_reset(instance: InstanceProcess, how: str) -> None:
    before = closed(instance, "stalled_read")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", instance.port))
        client.sendall(b"GET /trial/large?megabytes=20&how=%s HTTP/1.1\r\nHost: service\r\n\r\n" % how.encode())
        eventually(lambda: closed(instance, "stalled_read") == before + 1)


def test_a_client_that_reads_its_answer_slowly_has_all_of_it(instance: InstanceProcess) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.connect(("127.0.0.1", instance.port))
        client.sendall(b"GET /trial/large?megabytes=8&how=whole HTTP/1.1\r\nHost: service\r\nConnection: close\r\n\r\n")
        received = 0
        while piece := client.recv(1 << 20, socket.MSG_WAITALL):
            received += len(piece)
            # Longer, all together, than nothing may be taken.
            time.sleep(0.5)
    assert received > 8 << 20


# -- many -------------------------------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_turn_up_to_a_limit(instance: InstanceProcess) -> None:
    with connect(instance) as client:
        client.sendall((LIVE + b"\r\n") * 20 + LIVE + b"Connection: close\r\n\r\n")
        received = b""
        while piece := client.recv(65536):
            received += piece
    assert received.count(b"HTTP/1.1 200") == 21
    before = closed(instance, "pipelined")
    ask(instance, b"GET /trial/slow?seconds=1 HTTP/1.1\r\nHost: service\r\n\r\n" * 3000)
    assert closed(instance, "pipelined") == before + 1


def test_clients_that_leave_in_the_middle_of_a_body_are_a_line_each_and_no_traceback(instance: InstanceProcess) -> None:
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


def test_a_websocket_that_nothing_serves_is_refused_and_counted_no_more(instance: InstanceProcess) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    with connect(instance) as client:
        client.sendall(LIVE + upgrade + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 403")
        assert client.recv(65536) == b""


@pytest.mark.parametrize("mode", ["serve", "uvicorn", "workers"])
def test_the_limits_hold_however_the_service_was_started(fleet: Fleet, mode: Mode) -> None:
    instance = fleet.start(1, mode, **QUICK)[0]
    assert ask(instance, *TOO_LARGE["one header"])[0] == 431
    assert ask(instance, LIVE)[0] == 408


# -- the number of connections ----------------------------------------------------------------------------------------

LIMIT = 24


@pytest.fixture
def small(address: str, tmp_path: Path) -> Iterator[InstanceProcess]:
    with Fleet(address, tmp_path, FLOTILLA_CONNECTIONS=str(LIMIT)) as fleet:
        yield fleet.start()[0]


@pytest.mark.parametrize("sent", [b"", b"GET /health"], ids=["silent", "dribbling"])
def test_a_flood_of_clients_without_a_request_displaces_none_that_has_one(small: InstanceProcess, sent: bytes) -> None:
    with ExitStack() as stack, connect(small) as busy:
        busy.sendall(LIVE.replace(b"/health/live", b"/trial/slow?seconds=2") + b"Connection: close\r\n\r\n")
        for _ in range(10 * LIMIT):
            client = stack.enter_context(connect(small))
            client.sendall(sent)
        for path in ("/health/live", "/health/ready", "/actions"):
            assert small.status(path) == 200
        assert answer_on(busy)[0] == 200
        assert closed(small, "limit") >= 9 * LIMIT
    # Kept-alive connections are displaced too, by each other.
    with ExitStack() as stack:
        for _ in range(3 * LIMIT):
            assert is_alive_on(stack.enter_context(connect(small)))


def test_where_every_connection_has_a_request_others_are_503_and_probes_are_answered(small: InstanceProcess) -> None:
    slow = b"GET /trial/slow?seconds=600 HTTP/1.1\r\nHost: service\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(LIMIT):
            stack.enter_context(connect(small)).sendall(slow)
        eventually(lambda: small.status("/actions") == 503)
        for _ in range(3):
            refused = httpx.get(small.url + "/actions", verify=NO_TRUST)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert refused.json()["type"] == "/problems/unavailable"
            assert [small.status(f"/health/{probe}") for probe in ("live", "ready")] == [200, 200]
        # A flood on top of that: nobody's request is touched, and probes get through.
        for _ in range(300):
            stack.enter_context(connect(small))
        assert [small.status(f"/health/{probe}") for probe in ("live", "ready")] == [200, 200]
    eventually(lambda: small.status("/actions") == 200)


def test_streams_leave_room_for_other_requests(small: InstanceProcess) -> None:
    with ExitStack() as stack:
        for _ in range(LIMIT * 3 // 4):
            client = stack.enter_context(connect(small))
            client.sendall(b"GET /events HTTP/1.1\r\nHost: service\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        assert small.status("/events") == 503
        assert small.status("/actions") == 200


def test_more_clients_than_files_are_allowed_do_not_end_the_probes(fleet: Fleet) -> None:
    instance = fleet.start(1, TRIAL_FILES="300")[0]
    (line,) = instance.lines("server.few_files")
    assert line["connections"] < line["files"] == 300
    with ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(connect(instance))
        assert [instance.status(path) for path in ("/health/live", "/health/ready", "/actions")] == [200] * 3
    assert instance.me()["state"] == "ready"


# -- who may connect --------------------------------------------------------------------------------------------------


def test_without_keys_and_without_a_host_only_this_machine_can_connect(instance: InstanceProcess) -> None:
    # Every address of 127.0.0.0/8 is this machine's; one that listens everywhere answers at each.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", instance.port), timeout=5)
    assert instance.lines("server.exposed") == []


def test_a_host_that_others_reach_is_taken_and_without_keys_warned_about(fleet: Fleet) -> None:
    everywhere = "0.0.0.0"  # noqa: S104 — what is tested
    line = f"me:admin:{'0' * 64}"
    without, with_keys = (
        fleet.start(1, FLOTILLA_HOST=everywhere)[0],
        fleet.launch(FLOTILLA_HOST=everywhere, FLOTILLA_API_KEYS=line).wait_ready(),
    )
    assert [each["host"] for each in without.lines("server.exposed")] == [everywhere]
    assert with_keys.lines("server.exposed") == []
    socket.create_connection(("127.0.0.2", without.port), timeout=5).close()
