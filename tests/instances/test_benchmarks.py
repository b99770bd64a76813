"""The benchmarks run, in their short form: a figure nobody can take any more is no figure."""

import subprocess
import sys

import pytest

from tests.support.fleet import ROOT, environment


@pytest.mark.timeout(300)
def test_every_benchmark_prints_its_figures() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--short"],
        cwd=ROOT,
        env=environment(None, {"PYTHONWARNINGS": "default"}),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name, figure in (
        ("takeover", "SIGKILL of the leader → a new leader"),
        ("outage", "same ids: True; false deaths: 0"),
        ("start", "second time, to three ready"),
        ("idle", "a follower/s"),
    ):
        assert f"== {name} " in done.stdout
        assert figure in done.stdout
