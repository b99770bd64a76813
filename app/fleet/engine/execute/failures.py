"""The log of failed attempts: a line for each, and a whole traceback once a minute for each cause.

When a dependency is down, every attempt that needs it fails in the same place, and thousands of equal tracebacks hide
whatever else is wrong. A cause is an action, the class of the exception and the line that raised it. The run keeps the
whole text of its own error.
"""

from typing import Any, NamedTuple

from app.fleet.engine.execute.run import Run
from app.fleet.telemetry.logs import events

# How long after a cause's traceback the next one is written, in seconds.
TRACEBACK_EVERY = 60.0
# How many causes are remembered. With more, the oldest is forgotten, and its traceback is written again.
CAUSES_MOST = 500
REASON_MOST = 500

log = events(__name__)


class Cause(NamedTuple):
    action: str
    kind: type[BaseException]
    where: str


class FailureLog:
    def __init__(self) -> None:
        # When the cause's traceback was written, and how many attempts have failed with it since.
        self._causes: dict[Cause, tuple[float, int]] = {}

    def write(self, run: Run[Any], error: BaseException, reason: str, now: float) -> None:
        cause = Cause(run.action, type(error), where_raised(error))
        written, times = self._causes.get(cause, (-TRACEBACK_EVERY, 0))
        again = now - written >= TRACEBACK_EVERY
        log.warning(
            "run.raised",
            run=run.id,
            action=run.action,
            attempt=run.attempt,
            reason=reason[:REASON_MOST],
            where=cause.where,
            times=times + 1,
            error=error if again else None,
        )
        if again:
            self._causes.pop(cause, None)
        self._causes[cause] = (now, 0) if again else (written, times + 1)
        if len(self._causes) > CAUSES_MOST:
            del self._causes[next(iter(self._causes))]


def where_raised(error: BaseException) -> str:
    """Return the file and the line that raised it."""
    trace = error.__traceback__
    if trace is None:
        return "?"
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
