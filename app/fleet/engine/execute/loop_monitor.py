"""The event-loop monitor: a thread that finds the attempt that blocks the event loop.

The loop ticks ten times a second. When it has not ticked for `BLOCKED` seconds, the task that is running blocks it. If
that task is an attempt, the attempt notes for how long, and the log names the line of code. The monitor ends nothing:
the link has a thread of its own, so the instance stays alive, and another instance ends the run after its deadline
(`maintenance/rescuer.py`).
"""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from app.fleet.engine.execute.attempt import Attempt
from app.fleet.telemetry.logs import event_log

BLOCKED = 1.0
INTERVAL = 0.25

log = event_log(__name__)


class LoopMonitor:
    def __init__(self, attempts: Callable[[], Sequence[Attempt]]) -> None:
        self._attempts = attempts
        self._ticked_at = 0.0
        self._logged: Attempt | None = None
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._loop_thread = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self.tick()
        self._thread = threading.Thread(target=self._monitor, name="loop-monitor", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """The loop is not blocked at this moment."""
        self._ticked_at = time.monotonic()
        self._logged = None

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _monitor(self) -> None:
        while not self._stopping.wait(INTERVAL):
            blocked_for = time.monotonic() - self._ticked_at
            if blocked_for > BLOCKED:
                self._report(blocked_for)

    def _report(self, blocked_for: float) -> None:
        assert self._loop is not None
        task = asyncio.current_task(self._loop)
        attempt = next((each for each in self._attempts() if each.task is task), None) if task is not None else None
        if attempt is None:
            return
        attempt.blocked_seconds = blocked_for
        if self._logged is not attempt:
            self._logged = attempt
            frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 — the only way to see another thread
            line = traceback.extract_stack(frame)[-1] if frame is not None else None
            where = f"{line.filename}:{line.lineno}" if line is not None else "?"
            log.warning("run.blocks_loop", run=attempt.run_id, action=attempt.action.name, where=where)
