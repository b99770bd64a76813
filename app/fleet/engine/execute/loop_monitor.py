"""Who blocks the event loop? A thread looks, because the loop itself cannot.

The loop ticks ten times a second. When it has not for `BLOCKED` seconds, the task that is running is the culprit, and
if it belongs to a run, the run is told, and the log says where it was: which line of whose code. Nothing is ended
here: the link has a thread of its own, so the instance stays alive, and a deadline that passes meanwhile is seen to by
another instance (`maintenance/rescuer.py`).
"""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from app.fleet.engine.execute.run import Run
from app.fleet.telemetry.logs import events

BLOCKED = 1.0
LOOK = 0.25

log = events(__name__)


class LoopMonitor:
    def __init__(self, runs: Callable[[], Sequence[Run[Any]]]) -> None:
        self._runs = runs
        self._ticked = 0.0
        self._said: Run[Any] | None = None
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._watched = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched = threading.get_ident()
        self.tick()
        self._thread = threading.Thread(target=self._look_for_ever, name="watch", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """Say that the loop goes round."""
        self._ticked = time.monotonic()
        self._said = None

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _look_for_ever(self) -> None:
        while not self._stopping.wait(LOOK):
            still_for = time.monotonic() - self._ticked
            if still_for > BLOCKED:
                self._accuse(still_for)

    def _accuse(self, still_for: float) -> None:
        assert self._loop is not None
        task = asyncio.current_task(self._loop)
        run = next((run for run in self._runs() if run.task is task), None) if task is not None else None
        if run is None:
            return
        run.blocked = still_for
        if self._said is not run:
            self._said = run
            frame = sys._current_frames().get(self._watched)  # noqa: SLF001 — there is no other way to see a thread
            place = traceback.extract_stack(frame)[-1] if frame is not None else None
            where = f"{place.filename}:{place.lineno}" if place is not None else "?"
            log.warning("run.blocks_loop", run=run.id, action=run.action, where=where)
