"""Ends all processes that a test process has started and not ended, even if the test process is killed.

A killed test process runs no fixture's cleanup. Its PostgreSQL servers, instances and their children would continue to
run, and some of them are not found among its children: a PostgreSQL server leaves the process group of its parent, and
a worker of uvicorn outlives its parent. But all processes keep the environment that they were started with. So each
test process puts a mark into its environment, which all its children inherit, and starts a reaper with a pipe. When the
pipe is closed, by the test process or by its end, the reaper ends all processes with the mark. Then it removes the
given folder, unless the test process asked it to keep the folder.

The reaper has its own session, so that Ctrl-C in a terminal does not reach it. It needs Linux's `/proc`.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "TESTED_BY"
# Seconds that a PostgreSQL server may take to stop and to remove its shared memory.
PATIENCE = 5.0
KEEP = b"keep"


class Reaper:
    """The client in the test process."""

    def __init__(self, folder: Path | None = None) -> None:
        """Mark all processes started from now on. At the end, remove `folder`."""
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        mark = f"{os.getpid()}-{time.time_ns()}"
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, mark, *([str(folder)] if folder else [])],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.environ[MARK] = mark

    def keep_folder(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(KEEP)
        self._process.stdin.flush()

    def close(self) -> None:
        """End all remaining processes, and wait until they are gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(4 * PATIENCE)


def marked(mark: str) -> dict[int, str]:
    """Return the processes with this mark, and the names of their programs."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "comm").read_text().strip()
    return found


def reap(mark: str) -> None:
    """End all of them; a PostgreSQL server by the signal for an immediate shutdown, after which it cleans up."""
    deadline = time.monotonic() + PATIENCE
    while left := marked(mark):
        for process, program in left.items():
            orderly = program == "postgres" and time.monotonic() < deadline
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGQUIT if orderly else signal.SIGKILL)
        if time.monotonic() > 2 * PATIENCE + deadline:
            return
        time.sleep(0.05)


def main() -> None:
    mark, *folders = sys.argv[1:]
    keep = sys.stdin.buffer.read() == KEEP
    reap(mark)
    if not keep:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
