"""The benchmarks run, in their short form: a figure nobody can take any more is no figure.

They take what their shortest measurements take, one after the other, because two at once would measure each other.
"""

import subprocess
import sys

import pytest

from benchmarks import peers
from tests.support.fleet import ROOT, environment
from tests.support.tools import missing

pytestmark = pytest.mark.long

FIGURES = {
    "throughput": ("Flotilla, one process", "pgbench, bare SQL", "≥ 40,000/s", "the feed costs"),
    "lines": ("5,000 lines", "of ours", "1 line, its last quarter against its first", "≥ 0.75"),
    "insert": ("POST /runs:batch", "trigger_many", "≥ 80,000/s"),
    "once": ("once_many, 1,000 each", "≥ 50,000/s", "once, sixteen tasks", "all of them seen before"),
    "latency": ("before POST → the action began", "p50 ≤ 5 ms", "p99 ≤ 20 ms"),
    "punctual": ("the action began", "median of the slots' p99", "≤ 50 ms", "each exactly once: kept"),
    "rescue": ("SIGKILL → begun elsewhere", "p99 ≤ 500 ms"),
    "backlog": ("snapshot, last quarter, against empty", "finished, against empty", "≤ 1.5"),
    "streams": (
        "run.emit, one process",
        "≥ 20,000/s",
        "emit → a client elsewhere, idle",
        "memory of an idle client",
        "complete and in order for each client: kept",
    ),
    "locks": (
        "uncontended, taken and released",
        "handed over",
        "one statement per heartbeat",
        "a singleton's instance is killed",
    ),
    "limits": ("who ask", "≤ 1%", "≤ 50", "share of each"),
    "idle": ("a follower/s", "each follower ≤ 2"),
    "takeover": ("SIGKILL of the leader → a new leader",),
    "outage": ("same ids: True; false deaths: 0",),
    "start": ("second time, to three ready",),
}


@pytest.fixture(scope="module")
def printed() -> str:
    """All of them, run once."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--short"],
        cwd=ROOT,
        env=environment(None, {"PYTHONWARNINGS": "default"}),
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FIGURES)
def test_a_benchmark_prints_its_figures(printed: str, name: str) -> None:
    own = printed.partition(f"== {name} ")[2].partition("\n== ")[0]
    assert own
    for figure in FIGURES[name]:
        assert figure in own


@pytest.mark.timeout(1200)
def test_there_is_no_benchmark_without_a_test(printed: str) -> None:
    assert {line.split()[1] for line in printed.splitlines() if line.startswith("== ")} == set(FIGURES)


@pytest.mark.timeout(1200)
def test_the_peers_are_measured_beside_us(printed: str) -> None:
    if not peers.installed():
        missing("the peers are not installed: `make bench` installs them, which alone needs them")
    for peer in ("PgQueuer 1.", "Procrastinate 3."):
        assert peer in printed
