"""How the dashboard writes durations and schedules, draws the timeline of a run, and makes the form of a payload."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from app.fleet import Run, action
from app.fleet.dashboard.frame import wording
from app.fleet.dashboard.payload_form import payload_fields, payload_of
from app.fleet.dashboard.timeline import WIDTH, timeline
from app.fleet.runs.effects.events import StoredEvent
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read.records import RunRecord

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12 ms"), (3.14159, "3.1 s"), (59, "59 s"), (60, "1 min"), (200, "3 min 20 s"), (3600, "1 h"),
        (7500, "2 h 5 min"), (86400 * 3 + 7200, "3 d 2 h"), (86400 + 60, "1 d"), (-1, "0 ms"), (None, ""),
    ],
)  # fmt: skip
def test_a_duration_has_two_units_at_most(seconds: float | None, text: str) -> None:
    assert wording.span(seconds) == text


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (None, "on request"),
        ("every 30s", "every 30s"),
        ("cron 0 9 * * 1-5 in Europe/Berlin", "at 09:00 on Monday through Friday, Europe/Berlin"),
        ("cron */5 * * * * in UTC jitter 10s", "every fifth minute of every hour, UTC, up to 10s later"),
    ],
)
def test_a_schedule_is_said_in_words(stored: str | None, words: str) -> None:
    assert wording.schedule(stored) == words


def test_a_time_is_relative_with_the_exact_one_beside_it() -> None:
    shown = str(wording.when(NOON - timedelta(minutes=5), NOON))
    assert ">5 min ago<" in shown
    assert 'datetime="2026-11-20T11:55:00.000+00:00"' in shown
    assert ">in 2 h<" in str(wording.when(NOON + timedelta(hours=2), NOON))


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (1000, "1,000"), (1001, "1,000+"), (100_000, "1,000+")])
def test_counting_stops_at_a_thousand(number: int, text: str) -> None:
    assert wording.count(number) == text


def state(seq: int, seconds: float, name: str, attempt: int = 0, instance: str | None = None) -> StoredEvent:
    text = json.dumps({"state": name, "attempt": attempt, "instance": instance})
    return StoredEvent(seq, "state", text, NOON + timedelta(seconds=seconds))


def run(**values: Any) -> RunRecord:
    whole: dict[str, Any] = dict.fromkeys(RunRecord.__dataclass_fields__)
    return RunRecord(**whole | {"id": 1, "created_at": NOON} | values)


def test_the_timeline_shows_waiting_a_takeover_and_the_end() -> None:
    events = [
        state(1, 0, "pending"),
        state(2, 10, "running", 1, "flotilla-1"),
        state(3, 20, "pending", 1),
        state(4, 30, "running", 2, "flotilla-2"),
        state(5, 100, "succeeded", 2, "flotilla-2"),
    ]
    ended = run(state=RunState.SUCCEEDED, finished_at=NOON + timedelta(seconds=100))
    drawn = timeline(ended, events, NOON + timedelta(hours=1))
    assert drawn.lanes == ["waiting", "flotilla-1", "flotilla-2"]
    assert [(bar.lane, bar.kind, bar.x, bar.width) for bar in drawn.bars] == [
        (0, "waiting", 0, 100), (1, "pending", 100, 100), (0, "waiting", 200, 100), (2, "succeeded", 300, 700),
    ]  # fmt: skip
    assert drawn.bars[1].title == "attempt 1 on flotilla-1, 10.000 s, then pending"


def test_the_bar_of_a_running_attempt_reaches_to_now() -> None:
    events = [state(1, 0, "pending"), state(2, 0.001, "running", 1, "flotilla-1")]
    drawn = timeline(run(state=RunState.RUNNING), events, NOON + timedelta(seconds=10))
    assert drawn.bars[-1].x + drawn.bars[-1].width == pytest.approx(WIDTH)
    assert drawn.bars[0].width > 1, "a short period is visible"


def test_a_run_that_was_just_created_has_a_timeline() -> None:
    assert timeline(run(state=RunState.PENDING), [state(1, 0, "pending")], NOON).lanes == ["waiting"]


def test_the_timeline_of_the_first_events_of_a_run_ends_with_them() -> None:
    events = [
        state(1, 0, "pending"),
        state(2, 10, "running", 1, "flotilla-1"),
        StoredEvent(3, "said", "1", NOON + timedelta(seconds=20)),
    ]
    failed = run(state=RunState.FAILED, finished_at=NOON + timedelta(hours=1))
    drawn = timeline(failed, events, NOON + timedelta(hours=2), is_whole=False)
    assert drawn.ended == NOON + timedelta(seconds=20)
    assert [(bar.kind, bar.x, bar.width) for bar in drawn.bars] == [("waiting", 0, 500), ("running", 500, 500)]
    assert drawn.bars[1].title == "attempt 1 on flotilla-1, 10.000 s, then what follows"


class Parcel(BaseModel):
    label: str
    weight: float = 1.5
    express: bool = True
    size: Literal["small", "large"] = "large"
    shelf: Literal[1, 2] = 1
    tags: list[str] = []


@action("pack")
async def pack(_: Run[Parcel]) -> None: ...


def test_the_form_of_a_payload_has_a_field_for_each_of_its_fields() -> None:
    shown = {each.label: (each.kind, each.required, each.value) for each in payload_fields(pack)}
    assert shown == {
        "Label": ("text", True, ""),
        "Weight": ("number", False, "1.5"),
        "Express": ("checkbox", False, "true"),
        "Size": ("choice", False, "large"),
        "Shelf": ("json", False, "1"),
        "Tags": ("json", False, "[]"),
    }
    sent = {"payload.label": "x", "payload.weight": "2", "payload.size": "small", "payload.shelf": "2"}
    checked = pack.adapter.validate_python(payload_of(pack, sent))
    assert checked == Parcel(label="x", weight=2, express=False, size="small", shelf=2)


def test_a_refused_form_shows_what_was_given_and_not_the_defaults() -> None:
    shown = {each.label: each.value for each in payload_fields(pack, {"payload.label": "x", "payload.size": "small"})}
    assert (shown["Label"], shown["Express"], shown["Size"]) == ("x", "", "small")
