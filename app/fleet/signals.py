"""The handler before the server's: it has every signal first, and passes it on when the time has come.

uvicorn installs its own handler before it runs the lifespan, and closes its listener within 100 ms of a signal. A
handler that is installed during start-up replaces uvicorn's and can call it later; one installed before would be
overwritten, and `loop.add_signal_handler` would leave uvicorn without the signal for good.

    first signal        the shutdown begins; the server knows nothing yet
    second              the wait is skipped
    hand-over           the server has the first signal now
    any further one     is the server's alone

Outside the main thread, where Python has no signal handlers, nothing is installed, and the shutdown begins with the
lifespan's end.
"""

import asyncio
import math
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from app.fleet.server import Server

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """One handler for the life of the process."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._received: int | None = None
        self._handed_over = False
        self._begin: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.server = Server()

    @property
    def received(self) -> bool:
        """Whether a signal came in, so that the process is to end."""
        return self._received is not None

    def install(self, begin: Callable[[], None], *, patience: float) -> None:
        """From now on a signal calls `begin` in the loop; so does each further one, until the hand-over."""
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self.server.bound_patience(math.ceil(patience))
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._on_signal) for number in NUMBERS}

    def restore(self) -> None:
        for number, former in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, former)

    def hand_over(self) -> None:
        """Let the server have the signal it would have had at once without us."""
        self._handed_over = True
        if self._received is not None:
            self._pass_on(self._received)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Do no more than a signal handler should: everything else happens in the loop."""
        if self._handed_over:
            self._pass_on(number)
        elif self._loop is not None:
            self._received = self._received or number
            self._loop.call_soon_threadsafe(self._begin)

    def _pass_on(self, number: int) -> None:
        former = self._handlers.get(number)
        if callable(former):
            former(number, None)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
