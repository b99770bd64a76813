"""A network that is cut: the instance stops acting before the server ends its session, and rejoins with a new id.

The tests use network namespaces and take their interfaces down: no packet passes and neither side receives an error,
which no proxy can imitate.
"""

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, InstanceProcess, Mode, by_name
from tests.support.postgres import Postgres, eventually, server
from tests.support.tools import network_namespaces


@dataclass(frozen=True)
class Network:
    """A network namespace with one virtual cable to the namespace of the tests."""

    name: str
    here: str
    there: str

    def cable(self, state: str) -> None:
        subprocess.run(["ip", "link", "set", f"{self.name}h", state], check=True)

    @contextmanager
    def probing(self, port: int, seen: Path, path: str = "/health/ready") -> Iterator["Probe"]:
        """Probe the instance repeatedly from inside its namespace, where it stays reachable when the cable is down."""
        command = [
            "ip",
            "netns",
            "exec",
            self.name,
            sys.executable,
            "-S",
            "-c",
            PROBE,
            f"http://127.0.0.1:{port}{path}",
        ]
        with seen.open("w") as out, subprocess.Popen(command, stdout=out) as process:
            try:
                yield Probe(seen)
            finally:
                process.kill()


# Prints each change of the status, with the time.
PROBE = """
import sys, time, urllib.error, urllib.request
last = None
while True:
    try:
        status = urllib.request.urlopen(sys.argv[1], timeout=5).status
    except urllib.error.HTTPError as error:
        status = error.code
    except OSError:
        status = 0
    if status != last:
        print(time.time(), status, flush=True)
        last = status
    time.sleep(0.02)
"""


@dataclass(frozen=True)
class Probe:
    """The statuses that a prober in the network namespace of the instance has recorded."""

    seen: Path

    def answers(self) -> list[tuple[float, int]]:
        lines = [line.split() for line in self.seen.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [(float(at), int(status)) for at, status in lines]

    def since(self, status: int) -> float | None:
        """Return the time of the latest answer, if it has this status."""
        answers = self.answers()
        return answers[-1][0] if answers and answers[-1][1] == status else None


@pytest.fixture
def network() -> Iterator[Network]:
    network_namespaces()
    number = secrets.randbelow(200) + 20
    made = Network(f"fl{secrets.token_hex(3)}", f"10.77.{number}.1", f"10.77.{number}.2")
    steps = [
        f"ip netns add {made.name}",
        f"ip link add {made.name}h type veth peer name {made.name}n",
        f"ip link set {made.name}n netns {made.name}",
        f"ip addr add {made.here}/24 dev {made.name}h",
        f"ip link set {made.name}h up",
        f"ip netns exec {made.name} ip addr add {made.there}/24 dev {made.name}n",
        f"ip netns exec {made.name} ip link set {made.name}n up",
        f"ip netns exec {made.name} ip link set lo up",
    ]
    try:
        for step in steps:
            subprocess.run(step.split(), check=True, capture_output=True)
        yield made
    finally:
        subprocess.run(["ip", "netns", "del", made.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{made.name}h"], check=False, capture_output=True)


@pytest.fixture
def reachable_postgres() -> Iterator[Postgres]:
    with server(configuration="listen_addresses = '*'\n") as running:
        with (running.data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 10.77.0.0/16 trust\n")
        running.command("pg_ctl", "reload", "-D", str(running.data))
        yield running


class IsolatedInstance(InstanceProcess):
    """An instance in its own network namespace."""

    def __init__(self, network: Network, postgres: Postgres, log: Path) -> None:
        self._network = network
        address = f"postgresql://postgres@{network.here}:{postgres.port}/postgres"
        super().__init__("serve", address, log, {"FLOTILLA_INSTANCE_NAME": "island"})

    def _command(self, mode: Mode) -> list[str]:
        return ["ip", "netns", "exec", self._network.name, *super()._command(mode)]


def test_a_cut_off_instance_stops_before_it_is_declared_gone_and_rejoins_with_a_new_id(
    network: Network, reachable_postgres: Postgres, tmp_path: Path
) -> None:
    with Fleet(reachable_postgres.address_of(), tmp_path) as fleet:
        (witness,) = fleet.start()
        island = IsolatedInstance(network, reachable_postgres, tmp_path / "island.log")
        fleet.instances.append(island)
        with (
            network.probing(island.port, tmp_path / "ready") as ready,
            network.probing(island.port, tmp_path / "live", "/health/live") as live,
            reachable_postgres.session() as session,
        ):
            eventually(lambda: ready.since(200))
            before = by_name(witness.instances())["island"]["id"]

            network.cable("down")
            stopped_at = eventually(lambda: ready.since(503))
            gone = "SELECT extract(epoch FROM gone_at)::float8 FROM flotilla.instances WHERE id = %s AND state = 'gone'"
            (declared_at,) = eventually(lambda: session.execute(gone, [before]).fetchone())
            # The instance stopped acting before the server ended its session: this order makes it safe.
            assert stopped_at < declared_at

            network.cable("up")
            eventually(lambda: ready.since(200))
            (lost,) = island.lines("instance.identity_lost")
            assert lost["id"] == before
            assert by_name(witness.instances())["island"]["id"] > before
            assert {status for _, status in live.answers()} <= {0, 200}
            assert live.since(200), "the process was alive all the time"


def test_an_instance_keeps_its_identity_through_a_short_network_cut(
    network: Network, reachable_postgres: Postgres, tmp_path: Path
) -> None:
    with Fleet(reachable_postgres.address_of(), tmp_path) as fleet:
        island = IsolatedInstance(network, reachable_postgres, tmp_path / "island.log")
        fleet.instances.append(island)
        with network.probing(island.port, tmp_path / "ready") as ready, reachable_postgres.session() as session:
            eventually(lambda: ready.since(200))
            beat = "SELECT heartbeat_at FROM flotilla.instances WHERE name = 'island'"
            before = session.execute(beat).fetchone()
            network.cable("down")
            # Shorter than the patience of the instance.
            time.sleep(1)
            network.cable("up")
            eventually(lambda: ready.since(200) and session.execute(beat).fetchone() != before)
        assert not island.lines("instance.identity_lost")
