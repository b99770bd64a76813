"""The phase of this instance: starting, ready, draining. It only moves forward.

There is one object per instance. The edge reads it (readiness, `Connection: close`, streams), and so does everything
that claims work. `draining` is the event to wait for; it is set at the signal, long before the lifespan ends.
"""

import asyncio
import enum
from collections.abc import Callable


class Phase(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Lifecycle:
    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.reason = "starting"
        self.draining = asyncio.Event()
        # Callbacks for the beginning of the drain, for thousands of streams: a task for each would cost more.
        self.at_drain: set[Callable[[], None]] = set()

    def ready(self) -> None:
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY

    def drain(self, reason: str) -> None:
        if self.phase is not Phase.DRAINING:
            self.phase = Phase.DRAINING
            self.reason = reason
            self.draining.set()
            for callback in list(self.at_drain):
                callback()
