"""Deploys drop no request: three instances behind HAProxy, each restarted in turn three times, under constant load.

HAProxy only checks `/health/ready` and does not retry, so that every failed request is counted. It waits for a late
answer: without `timeout check`, it would remove an instance whose answer takes longer than the interval of the checks.
A second test shows that requests do fail without the drain delay: otherwise the first test would prove nothing.
"""

import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Self

import httpx
import pytest

from tests.support.fleet import NO_TRUST, Fleet, InstanceProcess
from tests.support.postgres import eventually, free_port
from tests.support.rounds import rounds
from tests.support.tools import program

CHECK_MS = 50
# As rare as the probes of an orchestrator. Until the next check, HAProxy sends requests to an instance that has ended.
RARE_CHECK_MS = 1000
CONFIGURATION = """
global
    maxconn 2000
defaults
    mode http
    timeout connect 2s
    timeout check 10s
    timeout client 30s
    timeout server 30s
    retries 0
frontend entry
    bind 127.0.0.1:{port}
    default_backend instances
backend instances
    balance roundrobin
    option httpchk GET /health/ready
    http-check expect status 200
{servers}
"""


class Load:
    """Sends requests until it is stopped, on kept and on new connections, and counts the outcomes."""

    def __init__(self, url: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in range(4)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @property
    def failed(self) -> Counter[str]:
        return Counter({outcome: count for outcome, count in self.outcomes.items() if outcome != "200"})

    def _run(self, number: int) -> None:
        # Half of the threads keep their connection, half use a new one for each request; every fourth request is slow.
        kept = httpx.Client(timeout=30, verify=NO_TRUST)
        with kept:
            while not self._stop.is_set():
                seconds = 0.3 if sum(self.outcomes.values()) % 4 == 0 else 0
                try:
                    get = kept.get if number % 2 else partial(httpx.get, verify=NO_TRUST)
                    answer = get(f"{self._url}/trial/slow?seconds={seconds}", timeout=30)
                    self.outcomes[str(answer.status_code)] += 1
                except httpx.TransportError as error:
                    self.outcomes[type(error).__name__] += 1
                time.sleep(0.01)


@pytest.fixture
def ports() -> list[int]:
    return [free_port() for _ in range(3)]


@pytest.fixture
def check_ms() -> int:
    """The interval at which HAProxy checks whether an instance is ready."""
    return CHECK_MS


@pytest.fixture
def entry(ports: list[int], tmp_path: Path, check_ms: int) -> Iterator[str]:
    """Run HAProxy in front of the three ports, and return its address."""
    port = free_port()
    servers = "\n".join(
        f"    server s{number} 127.0.0.1:{each} check inter {check_ms}ms fall 2 rise 1"
        for number, each in enumerate(ports)
    )
    configuration = tmp_path / "haproxy.cfg"
    configuration.write_text(CONFIGURATION.format(port=port, servers=servers))
    process = subprocess.Popen([program("haproxy"), "-db", "-f", str(configuration)], stderr=subprocess.DEVNULL)
    yield f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGTERM)
    process.wait()


def restart_each(fleet: Fleet, entry: str, ports: list[int], *, times: int, drain_delay: str) -> Load:
    instances = [fleet.launch(port=port, FLOTILLA_DRAIN_DELAY=drain_delay) for port in ports]
    for instance in instances:
        instance.wait_ready()
    # All three in rotation before the load begins.
    eventually(lambda: [httpx.get(f"{entry}/trial/slow?seconds=0").status_code for _ in range(6)] == [200] * 6)
    with Load(entry) as load:
        for _ in range(times):
            for number, instance in enumerate(instances):
                instance.terminate()
                instance.wait_exit()
                instances[number] = fleet.launch(port=ports[number], FLOTILLA_DRAIN_DELAY=drain_delay)
                instances[number].wait_ready()
                wait_until_in_rotation(entry, instances[number])
    return load


def wait_until_in_rotation(entry: str, instance: InstanceProcess) -> None:
    """Wait until HAProxy sends requests to this instance again, by its access log."""

    def served() -> bool:
        httpx.get(f"{entry}/trial/slow?seconds=0")
        return "/trial/slow" in instance.text

    eventually(served)


@pytest.mark.rounds
@pytest.mark.long
def test_rolling_restarts_of_three_instances_under_load_fail_no_request(
    fleet: Fleet, entry: str, ports: list[int]
) -> None:
    """The test takes long because three instances leave and start one after the other, and nine in `make chaos`."""
    times = rounds(3)
    load = restart_each(fleet, entry, ports, times=times, drain_delay="4")

    assert load.outcomes["200"] > 100 * times
    assert not load.failed
    assert not [line for instance in fleet.instances for line in instance.errors()]


@pytest.mark.parametrize("check_ms", [RARE_CHECK_MS])
def test_without_the_drain_delay_requests_fail_until_haproxy_has_probed_again(
    fleet: Fleet, entry: str, ports: list[int]
) -> None:
    load = restart_each(fleet, entry, ports, times=1, drain_delay="0")

    assert load.failed
