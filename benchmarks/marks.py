"""Records when an action began, in the action's own process: its first statement appends a line to a file.

All processes of a machine share the monotonic clock, so an action's time and a benchmark's time can be subtracted. For
the same reason, the wall clock is the one that PostgreSQL uses. A line is one `write`, so lines of several processes do
not mix. The file is in memory if possible: on disk, an append may wait for the file system's journal, which
PostgreSQL's own writes keep busy.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

from app.fleet import Run
from tests.support.postgres import eventually

# Not a setting of the service, so it has no `FLOTILLA_` prefix.
VARIABLE = "BENCHMARK_MARKS"
MEMORY = "/dev/shm"  # noqa: S108 — a directory; the file in it gets a unique name


@dataclass(frozen=True)
class Mark:
    run: int
    pid: int
    # Nanoseconds.
    monotonic: int
    # Seconds since 1970, and the slot of a scheduled run.
    wall: float
    slot: float | None


def leave(run: Run) -> None:
    """Record the start of a run. Called by an action as its first statement."""
    leave_number(run.id, run.scheduled_for.timestamp() if run.scheduled_for else "")


def leave_number(number: int, slot: float | str = "") -> None:
    """Record a start under a number. Called by a singleton with its token."""
    monotonic, wall = time.monotonic_ns(), time.time()
    os.write(opened(os.environ[VARIABLE]), f"{number} {os.getpid()} {monotonic} {wall:.6f} {slot}\n".encode())


@lru_cache
def opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


class Marks:
    """The file, as a benchmark reads it. It exists for the duration of the `with` block."""

    def __init__(self) -> None:
        self._read = 0
        self._found: list[Mark] = []

    def __enter__(self) -> Self:
        handle, path = tempfile.mkstemp(prefix="flotilla-marks-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        os.close(handle)
        self.path = Path(path)
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink()

    @property
    def env(self) -> dict[str, str]:
        return {VARIABLE: str(self.path)}

    def all(self) -> list[Mark]:
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")
        if whole:
            self._read += len(whole) + 1
            self._found += [parsed(line) for line in whole.decode().split("\n")]
        return self._found

    def wait(self, condition: Callable[[Mark], bool]) -> Mark:
        """Wait for the first mark that meets the condition, and return it."""
        return eventually(lambda: next(filter(condition, self.all()), None), every=0.005)


def parsed(line: str) -> Mark:
    run, pid, monotonic, wall, slot = line.split(" ")
    return Mark(int(run), int(pid), int(monotonic), float(wall), float(slot) if slot else None)
