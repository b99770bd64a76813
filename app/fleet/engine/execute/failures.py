"""Failed attempts: the error text and the traceback that the run keeps, and the log.

The log has a line for each failed attempt, and a whole traceback once a minute for each cause. When a dependency is
down, every attempt that needs it fails in the same place, and thousands of equal tracebacks would hide everything else.
A cause is an action, the class of the exception and the line that raised it. The run keeps the traceback of each of
its last attempts (`app/fleet/runs/attempt_writes.py`).

The methods of an action's exception are the action's own code, and may do anything. Nothing here lets that out.
"""

import asyncio
import math
import time
from typing import Any, NamedTuple

from app.fleet.duration import MAX_DURATION, parse_duration
from app.fleet.engine.execute.attempt import Attempt
from app.fleet.errors import GiveUp, PayloadInvalid, TryAgain
from app.fleet.runs.effects.retry_delay import FACTOR
from app.fleet.telemetry.logs import event_log
from app.fleet.telemetry.redaction import describe, redact
from app.fleet.telemetry.tracebacks import led_to, traceback_of

# Seconds between two tracebacks of one cause.
TRACEBACK_INTERVAL = 60.0
# How many causes are remembered. Beyond that the oldest is forgotten, and its traceback is logged again.
MAX_CAUSES = 500
# Characters of a reason in the log, and of an error in the run's row.
MAX_REASON = 500
MAX_ERROR = 10_000
UNREADABLE = "(its text cannot be read)"

log = event_log(__name__)


class Cause(NamedTuple):
    action: str
    kind: type[BaseException]
    where: str


class FailureLog:
    def __init__(self) -> None:
        # When the traceback of the cause was logged, and how many attempts have failed with it since.
        self._causes: dict[Cause, tuple[float, int]] = {}

    def write(self, attempt: Attempt, reason: str, error: BaseException | None, retry_in: float | None) -> None:
        """Log the end of an attempt: the run is tried again about so many seconds later, or (None) has failed.

        `error` is the exception that has ended it, if there is one. `TryAgain` and `GiveUp` are what the action means
        to do: they have no traceback.
        """
        fields: dict[str, Any] = {
            "run": attempt.run_id,
            "action": attempt.action.name,
            "attempt": attempt.number,
            "reason": reason[:MAX_REASON],
        }
        if retry_in is not None:
            fields["retry_in_seconds"] = round(retry_in, 1)
        if error is not None and not isinstance(error, TryAgain | GiveUp):
            fields |= self._place_of(attempt, error)
        if retry_in is None:
            log.error("run.failed", **fields)
        elif isinstance(error, TryAgain):
            log.info("run.retrying", **fields)
        else:
            log.warning("run.retrying", **fields)

    def _place_of(self, attempt: Attempt, error: BaseException) -> dict[str, Any]:
        """Return where the exception was raised, and once a minute the exception, whose traceback is logged."""
        now = time.monotonic()
        cause = Cause(attempt.action.name, type(error), where_raised(error))
        logged_at, times = self._causes.pop(cause, (-math.inf, 0))
        with_traceback = now - logged_at >= TRACEBACK_INTERVAL
        self._causes[cause] = (now, 0) if with_traceback else (logged_at, times + 1)
        if len(self._causes) > MAX_CAUSES:
            del self._causes[next(iter(self._causes))]
        return {"where": cause.where, "times": times + 1, "error": error if with_traceback else None}


def where_raised(error: BaseException) -> str:
    """Return the file and the line that raised the exception."""
    trace = error.__traceback__
    if trace is None:
        return "?"
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def reason_of(error: BaseException) -> str:
    """Return the class and the text of an exception as one line."""
    try:
        text = describe(error)
    except BaseException:  # noqa: BLE001 — the exception is the action's; its `__str__` may do anything
        text = f"{type(error).__name__}: {UNREADABLE}"
    if issubclass(type(error), asyncio.CancelledError):
        return text.replace(type(error).__name__, "it was cancelled from inside", 1)
    return text


def exceeded(attempt: Attempt) -> str:
    text = f"exceeded its deadline of {attempt.action.timeout:g} s"
    if attempt.blocked_seconds:
        text += f"; it blocked the event loop for {attempt.blocked_seconds:.0f} s"
    return text


def text_of(error: BaseException) -> str:
    """Return the text of an exception, without its class."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 — the exception is the action's; its `__str__` may do anything
        return UNREADABLE


def stored_traceback(error: BaseException) -> str | None:
    """Return the traceback that the run keeps, or None if it would say no more than the text of the error.

    `TryAgain` and `GiveUp` say what the action means, so only the exception that led to one of them adds something.
    """
    if isinstance(error, PayloadInvalid) or (isinstance(error, TryAgain | GiveUp) and led_to(error) is None):
        return None
    return traceback_of(error)


def delay_of(error: TryAgain) -> float | None:
    """Return the delay in seconds that the exception asks for; None means the delay of the action.

    The constructor of `TryAgain` checks it. But a subclass may not call that, and any code may set the attribute.
    """
    try:
        given = error.after
        delay = None if given is None else parse_duration(given)
    except BaseException:  # noqa: BLE001 — the exception is the action's; its properties may do anything
        return None
    return None if delay is None or math.isnan(delay) else min(max(0.0, delay), MAX_DURATION)


def usual_delay(attempt: Attempt) -> float:
    """Return about how many seconds PostgreSQL lets the run wait (`runs/effects/retry_delay.py`), for the log."""
    action = attempt.action
    return float(min(action.retry_delay * FACTOR ** min(attempt.counted_attempts - 1, 60), action.max_retry_delay))


def storable(text: str) -> str:
    """Return the text without secrets and as PostgreSQL can store it: without NUL and lone surrogates, bounded."""
    clean = redact(text).replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= MAX_ERROR else clean[:MAX_ERROR] + " …"
