"""A test run leaves no processes and files behind, however it ends, and does not disturb another one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fleet import ROOT
from tests.support.postgres import eventually, free_port

# Marks its environment, and starts a daemon: a process in another process group that becomes a child of process 1.
STARTER = '''
import subprocess, sys, time
from pathlib import Path
from tests.support.reaper import Reaper
reaper = Reaper(Path(sys.argv[1]))
# Its parent prints the id, and so before the reaper can end the new process.
daemon = """
import os, time
if (child := os.fork()) != 0:
    print(child, flush=True)
    os._exit(0)
time.sleep(600)
"""
subprocess.run([sys.executable, "-c", daemon], start_new_session=True)
if sys.argv[2] == "ends":
    reaper.close()
time.sleep(600)
'''


def started(folder: Path, how: str) -> tuple["subprocess.Popen[str]", int]:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(folder), how], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def runs(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_processes_of_a_killed_test_process_are_ended_and_its_folder_removed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    process, daemon = started(folder, "is killed")
    assert os.getpgid(daemon) != os.getpgid(process.pid)
    assert runs(daemon)
    end(process)
    eventually(lambda: not runs(daemon))
    eventually(lambda: not folder.exists())


def test_processes_of_a_test_process_are_ended_when_it_closes_its_reaper(tmp_path: Path) -> None:
    process, daemon = started(tmp_path / "folder", "ends")
    eventually(lambda: not runs(daemon))
    assert process.poll() is None
    end(process)


def test_processes_of_another_test_process_are_not_ended(tmp_path: Path) -> None:
    ended, its_daemon = started(tmp_path / "one", "is killed")
    other, daemon = started(tmp_path / "other", "is killed")
    end(ended)
    eventually(lambda: not runs(its_daemon))
    assert runs(daemon)
    end(other)
    eventually(lambda: not runs(daemon))


SCHEDULED = """
from pathlib import Path
from tests.support.scheduler import Scheduler

def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    return Scheduler(config, log)

def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        Path("a-worker-has-no-more-to-do").touch()
"""
TESTS = """
import os, pytest
from pathlib import Path
from tests.support.postgres import eventually

@pytest.mark.parametrize("number", range(3))
def test_before(number): ...

def test_that_ends_its_worker():
    if {workers} > 1:
        eventually(Path("a-worker-has-no-more-to-do").exists)
    os._exit(1)

def test_after(): ...
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_test_run_continues_after_a_test_that_ends_its_worker(tmp_path: Path, workers: int) -> None:
    """The new worker has one test left to run, or none, after all other workers have received their last test."""
    (tmp_path / "conftest.py").write_text(SCHEDULED)
    (tmp_path / "test_it.py").write_text(TESTS.format(workers=workers))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses", str(workers), "."]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert "1 failed, 4 passed" in done.stdout, done.stdout + done.stderr


# A process for which only this port is available, and which searches for at most a second.
TAKER = """
import signal, sys
from tests.support import postgres
postgres.PORTS = range(int(sys.argv[1]), int(sys.argv[1]) + 2)
signal.alarm(1)
postgres.free_port()
"""


def test_a_free_port_is_given_to_one_process_at_a_time() -> None:
    take = [sys.executable, "-c", TAKER, str(free_port())]
    assert subprocess.run(take, cwd=ROOT, check=False).returncode == -signal.SIGALRM
