"""Ends every process that a test process has started and not ended, whatever becomes of the test process.

A test process that is killed runs no fixture's end. Its PostgreSQL servers, its instances and their children would go
on, and some of them cannot be found as its children any more: a PostgreSQL server leaves the process group of its
starter, and a worker of uvicorn outlives its parent. All of them keep the environment they were started with. So each
test process puts a mark into its own environment, which every process that it starts inherits, and starts a reaper with
a pipe to it. When the pipe is closed, by the test process or by its end, the reaper ends every process with that mark,
and removes the folder that it was given, unless it was told to keep it.

It runs in a session of its own, so that Ctrl-C at a terminal does not reach it. It needs Linux's `/proc`.
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
# How long a PostgreSQL server may take to stop, and to remove what it shares with its processes.
PATIENCE = 5.0
KEEP = b"keep"


class Reaper:
    """The test process's side of it."""

    def __init__(self, folder: Path | None = None) -> None:
        """Mark whatever is started from here on, and remove `folder` when that has ended."""
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
        """End whatever is left, and wait until it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(4 * PATIENCE)


def marked(mark: str) -> dict[int, str]:
    """The processes with this mark, and the names of their programs."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "comm").read_text().strip()
    return found


def reap(mark: str) -> None:
    """End them all; a PostgreSQL server by the signal on which it stops at once and tidies up."""
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
