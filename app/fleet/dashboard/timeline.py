"""The timeline of a run: its periods as bars, in a lane for the time it waits and one for each instance."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from app.fleet.runs.effects.events import StoredEvent
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read.records import RunRecord

# The width of a timeline, in its own units; its smallest bar.
WIDTH, NARROWEST = 1000.0, 2.0
WAITING = "waiting"


@dataclass(frozen=True)
class Bar:
    """A period of a run: it waits, or an instance executes an attempt."""

    lane: int
    kind: str
    x: float
    width: float
    title: str


@dataclass(frozen=True)
class Timeline:
    # `waiting`, and the instances in the order in which they executed it.
    lanes: list[str]
    bars: list[Bar]
    began: datetime
    ended: datetime


def timeline(run: RunRecord, events: Sequence[StoredEvent], now: datetime, *, is_whole: bool = True) -> Timeline:
    """Return the periods of the run, from the events of its changes of state.

    If these are only its first events (not `is_whole`), the timeline ends with the last of them.
    """
    changes = [(each.at, json.loads(each.text or "{}")) for each in events if each.kind == "state"]
    ended = run.finished_at or max([now, *(at for at, _ in changes)]) if is_whole else events[-1].at
    began = changes[0][0] if changes else run.created_at
    scale = WIDTH / max((ended - began).total_seconds(), 0.001)
    lanes, bars = [WAITING], []
    for (at, change), (until, after) in zip(changes, [*changes[1:], (ended, {})], strict=True):
        if change["state"] not in {RunState.PENDING, RunState.RUNNING}:
            continue
        is_running = change["state"] == RunState.RUNNING
        lane = change["instance"] if is_running else WAITING
        if lane not in lanes:
            lanes.append(lane)
        outcome = after.get("state", run.state if is_whole else "what follows")
        what = f"attempt {change['attempt']} on {lane}" if is_running else WAITING
        left = (at - began).total_seconds() * scale
        width = max(NARROWEST, (until - at).total_seconds() * scale)
        kind = WAITING if not is_running else str(outcome) if after or is_whole else str(RunState.RUNNING)
        bars.append(Bar(lanes.index(lane), kind, round(left, 1), round(width, 1), titled(what, outcome, until - at)))
    return Timeline(lanes, bars, began, ended)


def titled(what: str, outcome: str, duration: timedelta) -> str:
    return f"{what}, {duration.total_seconds():.3f} s, then {outcome}"
