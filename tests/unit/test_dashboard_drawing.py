"""How the dashboard draws charts and sparklines."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from app.fleet.dashboard.charts import drawing, page
from app.fleet.dashboard.charts.drawing import BOTTOM, COUNTS, LEFT, LOWEST, RIGHT, SECONDS, TOP, scale_of
from app.fleet.dashboard.charts.minutes import SPANS, Period, by_outcome
from app.fleet.dashboard.frame import wording

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def hour(**periods: Period) -> list[Period]:
    """An hour in which nothing happened, except in the given minutes: `m5` is the sixth."""
    return [
        periods.get(f"m{each}", Period(NOON + timedelta(minutes=each), by_outcome(0, 0, 0, 0, 0), waiting=0))
        for each in range(60)
    ]


def at(minute: int, *counts: int, **figures: object) -> Period:
    ended = by_outcome(*[*counts, 0, 0, 0, 0, 0][:5])
    return Period(NOON + timedelta(minutes=minute), ended, **figures)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (0, ["0", "1"]), (1, ["0", "1"]), (3, ["0", "1", "2", "3"]), (7, ["0", "2", "4", "6", "8"]),
        (1234, ["0", "500", "1k", "1.5k"]), (60_000, ["0", "20k", "40k", "60k"]),
        (54_000_000, ["0", "20M", "40M", "60M"]),
    ],
)  # fmt: skip
def test_an_axis_of_counts_has_few_round_numbers(highest: float, ticks: list[str]) -> None:
    assert [each.text for each in scale_of(highest, COUNTS).ticks(wording.short)] == ticks


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (0.0, ["0", "1 ms"]), (0.03, ["0", "10 ms", "20 ms", "30 ms"]),
        (1.7, ["0", "500 ms", "1.0 s", "1.5 s", "2.0 s"]), (100, ["0", "30 s", "1 min", "1 min 30 s", "2 min"]),
        (7000, ["0", "30 min", "1 h", "1 h 30 min", "2 h"]),
        (200_000, ["0", "1 d", "2 d", "3 d"]),
    ],
)  # fmt: skip
def test_an_axis_of_durations_has_the_steps_of_a_clock(highest: float, ticks: list[str]) -> None:
    assert [each.text for each in scale_of(highest, SECONDS).ticks(wording.span)] == ticks


def test_an_axis_ends_at_the_edges_of_the_plot() -> None:
    ticks = scale_of(1234, COUNTS).ticks(wording.short)
    assert [ticks[0].position, ticks[-1].position] == [BOTTOM, TOP]


def test_bars_are_stacked_and_the_smallest_is_visible() -> None:
    drawn = drawing.bars({"good": [3, 0], "bad": [1, 0]}, ["first", ""], {0: "12:00"}, wording.short)
    good, bad = drawn.shapes
    unit = (BOTTOM - TOP) / 4
    assert good.path == f"M{LEFT:g} {BOTTOM:g}h169.2v{-3 * unit:g}h-169.2z"
    assert bad.path.startswith(f"M{LEFT:g} {BOTTOM - 3 * unit:g}h"), "on top of the other, and none without a number"
    assert bad.path.count("M") == 1
    assert [(each.x, each.title) for each in drawn.areas] == [(LEFT, "first")]
    million = drawing.bars({"good": [1_000_000], "bad": [1]}, [""], {}, wording.short)
    assert f"v{-LOWEST:g}" in million.shapes[1].path


def test_a_line_has_gaps_and_a_number_between_two_gaps_is_a_dot() -> None:
    drawn = drawing.lines({"wait": [1, 2, None, 4, None]}, [""] * 5, {}, COUNTS, wording.short)
    (line,) = drawn.shapes
    assert re.sub(r"[\d. ]+", "", line.path) == "MhLMh"
    points = [float(x) for x in re.findall(r"[ML]([\d.]+)", line.path)]
    assert points == [pytest.approx(LEFT + (place + 0.5) * (RIGHT - LEFT) / 5, abs=0.1) for place in (0, 1, 3)]


def test_a_sparkline_is_a_few_hundred_bytes() -> None:
    drawn = drawing.spark([each % 7 * 1000 + 1 for each in range(30)], [each % 3 for each in range(30)])
    assert len(drawn.all) + len(drawn.failed) < 600
    assert drawn.all.count("M") == 30
    assert drawn.failed.count("M") == 20, "no bar without a failure"
    assert drawing.spark([0] * 30, [0] * 30).all == ""


def test_a_chart_says_the_essence_in_words() -> None:
    periods = hour(
        m5=at(5, 1200, 3, begun=3, mean_wait=1.0, longest_wait=2.5, waiting=9, oldest=4.0),
        m59=at(59, 4, begun=1, mean_wait=5.0, longest_wait=5.0),
    )
    attempts, backlog, lateness = page.charts(periods, SPANS["hour"])
    assert attempts.label == (
        "Attempts that ended in the last hour: 1,204 succeeded, 3 failed. Most in a minute: 1,203, at 12:05."
    )
    assert list(attempts.legend.values())[-1] == "3 failed"
    assert attempts.drawing.areas[0].title == "12:05 1,200 succeeded, 3 failed"
    assert backlog.label == "Runs that could begin, in the last hour: at most 9, at 12:05; 0 at 12:58."
    assert lateness.label == (
        "Lateness of the 4 runs that began in the last hour: 2.0 s on average, at most 5.0 s, at 12:59."
    )
    assert lateness.drawing.areas[0].title == "12:05 longest 2.5 s, mean 1.0 s, oldest that waits 4.0 s"
    assert [each.text for each in attempts.drawing.across] == ["12:00", "12:15", "12:30", "12:45"]


def test_what_is_not_known_is_not_drawn_as_nothing() -> None:
    unknown = [Period(each.at, each.ended) for each in hour()]
    (_, backlog, lateness) = page.charts([*unknown[:-1], at(59, 0, 0, 1, 0, 0)], SPANS["hour"])
    assert backlog.label.endswith("not known.")
    assert lateness.label == "Lateness in the last hour: no run began."
    assert {shape.path for each in (backlog, lateness) for shape in each.drawing.shapes} == {""}
    assert page.charts(hour(), SPANS["hour"]) == []


@pytest.mark.parametrize(
    ("span", "now", "since"),
    [
        ("hour", "12:34:56+00:00", "11:35:00+00:00"),
        ("day", "12:34:56+00:00", "12:45:00+00:00"),
        ("day", "18:04:56+05:30", "12:45:00+00:00"),
    ],
)
def test_the_periods_begin_at_full_minutes_and_the_last_one_has_now(span: str, now: str, since: str) -> None:
    found = SPANS[span].since(datetime.fromisoformat(f"2026-11-20T{now}"))
    assert f"{found:%H:%M:%S}+00:00" == since
    assert found.utcoffset() == timedelta()


@pytest.mark.parametrize(
    ("ended", "text"),
    [({"succeeded": 1204, "failed": 3, "paused": 0}, "1,204 succeeded, 3 failed"), ({"failed": 0}, "none")],
)
def test_outcomes_are_listed_with_their_numbers(ended: dict[str, int], text: str) -> None:
    assert wording.outcomes(ended) == text
