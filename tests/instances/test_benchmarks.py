"""Every benchmark runs, in its short form, and prints its figures: otherwise it could break unnoticed.

Each test runs several benchmarks, which takes about half a minute. Other tests that run at the same time change the
figures, so the figures are not checked.
"""

import subprocess
import sys
from collections.abc import Sequence

import pytest

from benchmarks import peers
from tests.support.fleet import ROOT, environment
from tests.support.tools import missing

pytestmark = [pytest.mark.long, pytest.mark.template]

# The benchmarks that one test runs, one after the other; the groups take about the same time.
TOGETHER = (
    ("locks", "limits", "throughput"),
    ("start", "latency", "idle", "dashboard"),
    ("ordered", "rescue", "punctual", "traces"),
    ("backlog", "outage", "insert", "takeover", "once", "streams"),
)
FIGURES = {
    "throughput": ("Flotilla, one process", "pgbench, bare SQL", "≥ 40,000/s", "the feed costs"),
    "traces": ("without traces", "one run in a hundred traced", "all runs traced"),
    "ordered": ("5,000 keys", "of ours", "1 key, its last quarter against its first", "≥ 0.75"),
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
    "limits": ("callers", "≤ 1%", "≤ 50", "share of each"),
    "dashboard": ("/runs/{id}", "p99 ≤ 100 ms", "paint /dashboard", "50 viewers", "≤ 5/s", "≥ 0.97"),
    "idle": ("a follower", "each follower ≤ 2", "an instance  PostgreSQL"),
    "takeover": ("SIGKILL of the leader → a new leader",),
    "outage": ("same ids: True; false deaths: 0",),
    "start": ("second time, to three ready",),
}


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env=environment(None, {"PYTHONWARNINGS": "default"}),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_benchmarks_print_their_figures(names: Sequence[str]) -> None:
    done = run("--short", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        own = done.stdout.partition(f"== {name} ")[2].partition("\n== ")[0]
        for figure in FIGURES[name]:
            assert figure in own
    if "throughput" in names:
        if not peers.installed():
            missing("the peers are not installed: `make bench` installs them, which alone needs them")
        for peer in ("PgQueuer 1.", "Procrastinate 3."):
            assert peer in done.stdout


def test_every_benchmark_has_a_test() -> None:
    listed = run("none").stderr.partition("there are ")[2]
    assert {name.strip() for name in listed.split(",")} == set(FIGURES) == {name for own in TOGETHER for name in own}
