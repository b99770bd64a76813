"""The types of what streams send: the JSON of a run's events, of a change in the feed, and of the two closing messages.

They are for readers and for the OpenAPI document (`http/events.py`). The events themselves are text that the statements
of `effects/events.py` build, and that passes to clients unchanged; a test compares real streams with these types.

A later release may add fields and kinds.
"""

from datetime import datetime
from typing import Any, Literal, NotRequired

# Python 3.11 has no `TypeAliasType`, and pydantic does not accept its `TypedDict`.
from typing_extensions import TypeAliasType, TypedDict

from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read.records import Trigger


class StateData(TypedDict):
    """The first event of a run has `trigger` and `scheduled_for`. When a run is pending again, `error` says why its
    attempt ended, and `run_at` when it may start, except after an operator's retry. The end of a run has `result` and
    `error`."""

    state: RunState
    attempt: int
    instance: str | None
    trigger: NotRequired[Trigger]
    scheduled_for: NotRequired[datetime | None]
    run_at: NotRequired[datetime]
    result: NotRequired[Any]
    error: NotRequired[str | None]


class StateEvent(TypedDict):
    """A change of the run's state."""

    run: int
    seq: int
    kind: Literal["state"]
    data: StateData
    at: datetime


class ProgressData(TypedDict):
    """How far the run is, from 0 to 1."""

    done: float
    text: str | None


class ProgressEvent(TypedDict):
    """What an action reports with `run.progress`."""

    run: int
    seq: int
    kind: Literal["progress"]
    data: ProgressData
    at: datetime


class LogData(TypedDict):
    """A text for people who follow the run."""

    level: Literal["debug", "info", "warning", "error"]
    text: str


class LogEvent(TypedDict):
    """What an action reports with `run.log`."""

    run: int
    seq: int
    kind: Literal["log"]
    data: LogData
    at: datetime


class EmittedEvent(TypedDict):
    """What an action reports with `run.emit`: a kind of its own, with any data."""

    run: int
    seq: int
    kind: str
    data: Any
    at: datetime


# Without `EmittedEvent`, so that `kind` tells the types apart.
RunEvent = TypeAliasType("RunEvent", StateEvent | ProgressEvent | LogEvent)


class RunDone(TypedDict):
    """The message `done`: the run has ended, and all of its events have been sent."""

    run: int


class ChangeData(TypedDict):
    """The new state. Why a run ended, and its result, are in the run and in its own events."""

    state: RunState
    attempt: int
    instance: str | None


class FeedEvent(TypedDict):
    """A change of the state of any run."""

    run: int
    action: str | None
    seq: int
    kind: Literal["state"]
    data: ChangeData
    at: datetime


class FeedMissed(TypedDict):
    """The message `missed`: the changes above `after`, up to and including `until`, were deleted before this client
    received them."""

    after: int
    until: int
