"""From numbers to the shapes of an SVG: bars, lines, sparklines, and axes whose numbers a person reads.

Everything is in units of the `viewBox`, which grows and shrinks with the page. A path has all shapes of a kind, so that
a page stays light.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

# The whole drawing, and the edges of the plot in it: numbers are on the left of the plot and below it.
WIDTH, HEIGHT = 440.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 428.0, 10.0, 164.0
# A bar stays visible: a failure among a million successes too.
LOWEST = 1.5
# At most so many steps from zero to the highest number.
STEPS = 4
COUNTS = tuple(number * 10**power for power in range(15) for number in (1, 2, 5))
SECONDS = (
    *(number / 1000 for number in (1, 2, 5, 10, 20, 50, 100, 200, 500)),
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200),
    *(86400 * number for number in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)
# A sparkline: so many units for a point, and the height.
POINT, SPARK_HEIGHT = 4, 24


@dataclass(frozen=True)
class Tick:
    """A number on an axis."""

    position: float
    text: str


@dataclass(frozen=True)
class Shape:
    """All bars or lines of a kind."""

    kind: str
    path: str


@dataclass(frozen=True)
class Area:
    """A period from the bottom to the top: its title is shown while the pointer is there."""

    x: float
    width: float
    title: str


@dataclass(frozen=True)
class Drawing:
    across: list[Tick]
    up: list[Tick]
    shapes: list[Shape]
    areas: list[Area]


@dataclass(frozen=True)
class Spark:
    """A bar for each point: all attempts, and the failed ones over them."""

    width: int
    all: str
    failed: str


@dataclass(frozen=True)
class Scale:
    """The vertical axis, from zero to the first full step above the highest number."""

    step: float
    steps: int

    def y(self, number: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * number / (self.step * self.steps)

    def ticks(self, text: Callable[[float], str]) -> list[Tick]:
        numbers = [self.step * each for each in range(self.steps + 1)]
        return [Tick(round(self.y(each), 1), text(each) if each else "0") for each in numbers]


def scale_of(highest: float, steps: Sequence[float]) -> Scale:
    """Return a scale up to this number, in one of these steps."""
    step = next((each for each in steps if each * STEPS >= highest), steps[-1])
    return Scale(step, max(1, math.ceil(highest / step)))


def bars(
    kinds: Mapping[str, Sequence[int]], titles: Sequence[str], times: Mapping[int, str], text: Callable[[float], str]
) -> Drawing:
    """Stack the numbers of each kind, the first kind at the bottom: a bar for each period."""
    periods = len(titles)
    scale = scale_of(max(map(sum, zip(*kinds.values(), strict=True)), default=0), COUNTS)
    width = (RIGHT - LEFT) / periods
    tops = [BOTTOM] * periods
    shapes = []
    for kind, numbers in kinds.items():
        path = []
        for place, number in enumerate(numbers):
            if number:
                height = max(LOWEST, BOTTOM - scale.y(number))
                start = f"M{short(LEFT + place * width)} {short(tops[place])}"
                path.append(f"{start}h{short(width * 0.9)}v{short(-height)}h{short(-width * 0.9)}z")
                tops[place] -= height
        shapes.append(Shape(kind, "".join(path)))
    return Drawing(across(times, periods), scale.ticks(text), shapes, areas(titles))


def lines(
    kinds: Mapping[str, Sequence[float | None]],
    titles: Sequence[str],
    times: Mapping[int, str],
    steps: Sequence[float],
    text: Callable[[float], str],
) -> Drawing:
    """Draw a line for each kind; where a number is not known, the line has a gap."""
    periods = len(titles)
    known = [number for numbers in kinds.values() for number in numbers if number is not None]
    scale = scale_of(max(known, default=0), steps)
    width = (RIGHT - LEFT) / periods
    shapes = []
    for kind, numbers in kinds.items():
        path = []
        for before, (place, number) in pairwise([(-1, None), *enumerate(numbers)]):
            if number is not None:
                point = f"{short(LEFT + (place + 0.5) * width)} {short(scale.y(number))}"
                # A line without length is drawn as a dot: a number between two gaps.
                path.append(f"L{point}" if before[1] is not None else f"M{point}h0")
        shapes.append(Shape(f"line {kind}", "".join(path)))
    return Drawing(across(times, periods), scale.ticks(text), shapes, areas(titles))


def across(times: Mapping[int, str], periods: int) -> list[Tick]:
    width = (RIGHT - LEFT) / periods
    return [Tick(round(LEFT + place * width, 1), text) for place, text in times.items()]


def areas(titles: Sequence[str]) -> list[Area]:
    width = (RIGHT - LEFT) / len(titles)
    return [Area(round(LEFT + each * width, 1), round(width, 1), title) for each, title in enumerate(titles) if title]


def spark(numbers: Sequence[int], failed: Sequence[int]) -> Spark:
    """Draw a bar for each number; those of the failed ones are in front of them."""
    highest = max([1, *numbers])
    return Spark(len(numbers) * POINT, "".join(spark_bars(numbers, highest)), "".join(spark_bars(failed, highest)))


def spark_bars(numbers: Sequence[int], highest: int) -> Iterator[str]:
    for place, number in enumerate(numbers):
        if number:
            yield f"M{place * POINT + POINT // 2} {SPARK_HEIGHT}v{short(-max(LOWEST, SPARK_HEIGHT * number / highest))}"


def short(number: float) -> str:
    """Write a coordinate with one digit after the point, if it is not zero."""
    return f"{round(number, 1):g}"
