"""The signal handler: it receives every signal before uvicorn does, and passes it on when uvicorn may stop.

uvicorn installs its handler before it runs the lifespan, and closes its listener within 100 ms of a signal. A handler
that is installed during start-up replaces uvicorn's handler and can call it later. One that is installed earlier would
be overwritten, and `loop.add_signal_handler` would never let uvicorn have the signal.

    first signal        the shutdown begins; uvicorn does not receive the signal
    second              the shutdown's wait is skipped
    hand-over           uvicorn receives the first signal now
    any later one       goes to uvicorn alone

Python handles signals in the main thread only. In another thread nothing is installed, and the shutdown begins when the
lifespan ends.
"""

import asyncio
import math
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from app.fleet.server.process import Server

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._received: int | None = None
        self._handed_over = False
        self._begin: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.server = Server()

    @property
    def received(self) -> bool:
        """Whether a signal was received, so that the process will end."""
        return self._received is not None

    def install(self, begin: Callable[[], None], *, drain_timeout: float) -> None:
        """From now on, each signal calls `begin` in the event loop, until the hand-over."""
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self.server.limit_graceful_shutdown(math.ceil(drain_timeout))
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._on_signal) for number in NUMBERS}

    def restore(self) -> None:
        for number, previous in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous)

    def hand_over(self) -> None:
        """Pass the received signal on to uvicorn, which would have had it at once without this handler."""
        self._handed_over = True
        if self._received is not None:
            self._pass_on(self._received)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Only schedule the work: a signal handler should do nothing else. The event loop does the rest."""
        if self._handed_over:
            self._pass_on(number)
        elif self._loop is not None:
            self._received = self._received or number
            self._loop.call_soon_threadsafe(self._begin)

    def _pass_on(self, number: int) -> None:
        previous = self._handlers.get(number)
        if callable(previous):
            previous(number, None)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
