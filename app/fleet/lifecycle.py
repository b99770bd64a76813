"""Where this instance is in its life: starting, ready, draining. It only ever goes forward.

One object, owned by the wiring, read by the edge (readiness, `Connection: close`, streams) and by whoever claims work.
`draining` is what to wait on; the flag is raised at the signal, long before the lifespan ends.
"""

import asyncio
import enum
from collections.abc import Callable


class Phase(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Lifecycle:
    """The phase of this instance, and the moment it begins to drain."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.reason = "starting"
        self.draining = asyncio.Event()
        # Called at that moment. For those of whom there are very many; a task for each would cost more.
        self.at_drain: set[Callable[[], None]] = set()

    def ready(self) -> None:
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY

    def drain(self, reason: str) -> None:
        if self.phase is not Phase.DRAINING:
            self.phase = Phase.DRAINING
            self.reason = reason
            self.draining.set()
            for tell in list(self.at_drain):
                tell()
