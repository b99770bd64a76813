"""No caller can stop the others: during each attack, other requests are answered, and the instance keeps its identity.

Each attack is made on one of two real instances, beside a writer, a reader and a prober of the same instance, and an
action that is due every second. `python -m tests.instances.test_abuse` prints how long other requests took;
the bar is a p99 of 250 ms on two cores that do nothing else.
"""

import contextlib
import resource
import selectors
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Self

import httpx
import pytest

from tests.support.fleet import NO_TRUST, Fleet, InstanceProcess
from tests.support.postgres import Postgres, eventually, server
from tests.support.trial_abuse import RAISED

BAR_MS = 250
RESIDENT_MB = 400
MEGABYTE = 1 << 20
# Of the 2,000 connections, three quarters may be streams.
ENVIRONMENT = {
    "FLOTILLA_ACTIONS": "tests.support.trial_actions,tests.support.trial_abuse",
    "FLOTILLA_CONNECTIONS": "2000",
    "FLOTILLA_HEADER_TIMEOUT": "3",
}


# -- the other callers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    to: str
    status: int | str
    seconds: float


class Bystanders:
    """A writer and a reader on connections that they keep, and a prober with a new one for each probe."""

    def __init__(self, instance: InstanceProcess) -> None:
        self.answers: list[Answer] = []
        self._instance = instance
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._write, self._read, self._probe)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    @property
    def p99(self) -> float:
        return statistics.quantiles([answer.seconds for answer in self.answers], n=100, method="inclusive")[98]

    @property
    def fewest(self) -> int:
        """Return the smallest number of answers among the kinds of requests."""
        kinds = ("write", "read", "/health/live", "/health/ready")
        return min(sum(answer.to == kind for answer in self.answers) for kind in kinds)

    def check(self) -> None:
        assert [answer for answer in self.answers if answer.status not in {200, 202}] == []

    def _write(self) -> None:
        with self._client() as client:
            while not self._over.is_set():
                self._ask("write", lambda: client.post("/actions/echo/runs", json={"payload": {"a": 1}}))

    def _read(self) -> None:
        with self._client() as client:
            while not self._over.is_set():
                self._ask("read", lambda: client.get("/runs?limit=5"))

    def _probe(self) -> None:
        while not self._over.is_set():
            for path in ("/health/live", "/health/ready"):
                with self._client() as client:
                    self._ask(path, lambda: client.get(path))  # noqa: B023 — called at once

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self._instance.url, timeout=30, verify=NO_TRUST)

    def _ask(self, to: str, send: Callable[[], httpx.Response]) -> None:
        began = time.monotonic()
        try:
            status: int | str = send().status_code
        except httpx.TransportError as error:
            status = repr(error)
        self.answers.append(Answer(to, status, time.monotonic() - began))
        # A pause, because these threads represent a few normal clients and not another attack.
        self._over.wait(0.02)


# -- the attacks ------------------------------------------------------------------------------------------------------


def connect(instance: InstanceProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", instance.port), timeout=30)


def huge_headers(instance: InstanceProcess) -> None:
    """Five clients send a header of 100 MB each."""

    def send(_: int) -> bytes:
        with connect(instance) as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(b"GET / HTTP/1.1\r\nX-A: ")
                for _ in range(100):
                    client.sendall(b"a" * MEGABYTE)
            with contextlib.suppress(ConnectionError):
                return client.recv(12)
        return b""

    with ThreadPoolExecutor(5) as pool:
        # The response may be lost in the reset, because the server does not read everything.
        assert set(pool.map(send, range(5))) <= {b"HTTP/1.1 431", b""}


def silent_and_slow_clients(instance: InstanceProcess) -> None:
    """2,000 clients connect and send nothing, 300 more send a byte of a header now and then. All are closed."""
    with ExitStack() as stack, selectors.DefaultSelector() as waiting:
        for number in range(2300):
            client = stack.enter_context(connect(instance))
            client.setblocking(False)
            waiting.register(client, selectors.EVENT_READ, number % 8 == 0)
        deadline = time.monotonic() + 60
        while waiting.get_map():
            assert time.monotonic() < deadline, f"{len(waiting.get_map())} connections are open"
            closed = waiting.select(0.2)
            for key, _ in closed:
                assert isinstance(key.fileobj, socket.socket)
                with contextlib.suppress(ConnectionError):
                    if key.fileobj.recv(4096):
                        continue
                waiting.unregister(key.fileobj)
            for key in [key for key in waiting.get_map().values() if key.data]:
                assert isinstance(key.fileobj, socket.socket)
                with contextlib.suppress(OSError):
                    key.fileobj.send(b"G")


def feed_clients(instance: InstanceProcess) -> None:
    """1,500 clients open the feed at once, and read only the beginning of the response."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(instance)) for _ in range(1500)]
        for client in clients:
            client.sendall(b"GET /events HTTP/1.1\r\nHost: service\r\n\r\n")
        assert {client.recv(12) for client in clients} == {b"HTTP/1.1 200"}


def heavy_lists(instance: InstanceProcess) -> None:
    """There are forty runs of nearly 1 MB each, and four clients list all of them repeatedly."""
    payload = {"padding": "x" * 900_000}
    for _ in range(40):
        instance.trigger("echo", payload)

    def read(_: int) -> int:
        answer = httpx.get(f"{instance.url}/runs?limit=300", timeout=30, verify=NO_TRUST)
        assert answer.status_code == 200
        return len(answer.content)

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(read, range(12))) < 2 * MEGABYTE


def a_chatty_run(instance: InstanceProcess) -> None:
    """A run emits as fast as it can, while other runs must end."""
    chatty = instance.trigger("chatter", {"count": 10_000, "pause": 0})["id"]
    for _ in range(10):
        assert instance.ended(instance.trigger("echo", {"a": 1})["id"])["state"] == "succeeded"
    assert instance.ended(chatty, within=60)["state"] in {"succeeded", "failed"}


def odd_exceptions(instance: InstanceProcess) -> None:
    """Runs raise unusual exceptions; each run ends or waits for a retry, and its slot is free again."""
    ids = [instance.trigger("raise", {"what": what})["id"] for what in RAISED] * 2
    eventually(
        lambda: all(instance.run(run_id)["state"] != "running" and instance.run(run_id)["attempt"] for run_id in ids)
    )
    assert instance.ended(instance.trigger("echo", {"a": 1})["id"])["state"] == "succeeded"
    eventually(lambda: instance.me()["running"] == 0)


def an_open_transaction(instance: InstanceProcess) -> None:
    """A caller keeps its transaction open for 20 s after it has triggered a run of an action with `overlap="skip"`."""
    run_id = instance.trigger("hold-open", {"seconds": 600})["id"]
    eventually(lambda: instance.run(run_id)["state"] == "running")
    # The runs of another action continue; its slots are one second apart.
    until = slots(instance)[-1] + timedelta(seconds=20)
    eventually(lambda: slots(instance)[-1] >= until)
    assert instance.run(run_id)["state"] == "running"
    instance.client.post(f"/runs/{run_id}/cancel")
    assert instance.ended(run_id)["state"] == "cancelled"


ATTACKS: Sequence[Callable[[InstanceProcess], None]] = (
    huge_headers,
    silent_and_slow_clients,
    feed_clients,
    heavy_lists,
    a_chatty_run,
    odd_exceptions,
    an_open_transaction,
)


# -- checks after each attack -----------------------------------------------------------------------------------------


def slots(instance: InstanceProcess) -> list[datetime]:
    """Return the latest slots of the action that is due every second, in order."""
    runs = instance.client.get("/runs?action=beat&limit=500").json()["items"]
    return [datetime.fromisoformat(run["scheduled_for"]) for run in reversed(runs)]


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process in megabytes."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


@contextmanager
def start_instances(address: str, folder: Path) -> Iterator[list[InstanceProcess]]:
    """Start two instances, and allow this process as many open files as the attacks need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    with Fleet(address, folder, **ENVIRONMENT) as fleet:
        yield fleet.start(2)


def attack_with_bystanders(
    instances: Sequence[InstanceProcess], attack: Callable[[InstanceProcess], None]
) -> Bystanders:
    ids = [instance.me()["id"] for instance in instances]
    with Bystanders(instances[0]) as others:
        attack(instances[0])
        eventually(lambda: others.fewest >= 10, within=60)
    others.check()
    for instance in instances:
        instance.wait_ready()
    assert [instance.me()["id"] for instance in instances] == ids
    assert instances[0].lines("instance.identity_lost") == []
    # An attack may end before the first slot is due.
    last = eventually(lambda: slots(instances[0]))[-1]
    eventually(lambda: slots(instances[0])[-1] > last)
    gaps = [(later - earlier).total_seconds() for earlier, later in pairwise(slots(instances[0]))]
    assert [gap for gap in gaps if gap != 1] == []
    assert resident_mb(instances[0].pid) < RESIDENT_MB
    return others


@pytest.fixture(scope="module")
def instances(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[InstanceProcess]]:
    address = postgres.new_migrated_database()
    with start_instances(address, tmp_path_factory.mktemp("instances")) as own:
        yield own
    postgres.drop(address)


@pytest.mark.parametrize("attack", ATTACKS)
def test_other_requests_are_answered_while_one_caller_abuses_the_instance(
    instances: list[InstanceProcess], attack: Callable[[InstanceProcess], None], capsys: pytest.CaptureFixture[str]
) -> None:
    others = attack_with_bystanders(instances, attack)
    with capsys.disabled():
        sys.stdout.write(f" p99 of {len(others.answers)} other requests: {others.p99 * 1000:.0f} ms ")


def main() -> None:
    with (
        server() as postgres,
        tempfile.TemporaryDirectory() as folder,
        start_instances(postgres.new_migrated_database(), Path(folder)) as instances,
    ):
        for attack in ATTACKS:
            p99 = attack_with_bystanders(instances, attack).p99 * 1000
            verdict = "" if p99 <= BAR_MS else f"   over the bar of {BAR_MS} ms"
            sys.stdout.write(
                f"{attack.__name__:<26} p99 {p99:6.0f} ms   {resident_mb(instances[0].pid):4.0f} MB{verdict}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
