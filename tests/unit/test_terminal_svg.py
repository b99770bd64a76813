"""The drawing of a terminal, and the picture in the README that it has drawn."""

import re
from xml.etree import ElementTree

import pytest

from tests.support.terminal_svg import HOLD, Line, draw
from tests.unit.test_documentation import ROOT

pytestmark = pytest.mark.template

NAMESPACE = "{http://www.w3.org/2000/svg}"
PICTURE = ROOT / "docs" / "images" / "takeover.svg"
MAX_BYTES = 60_000
LINES = [
    Line(0, "$ kill -9 17 && echo '<gone>'", "command"),
    Line(1.5, 'pending: "flotilla-1" died', "failure"),
    Line(2.5, "running on flotilla-2, attempt 2 of 4", "success"),
]


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter(f"{NAMESPACE}text")]  # noqa: S314 — our own


def test_every_line_is_a_text_with_its_characters_escaped() -> None:
    assert texts(draw(LINES, title="A & B", description="<c>")) == [line.text for line in LINES]


def test_a_line_appears_at_its_time_and_stays_until_the_animation_begins_again() -> None:
    svg = draw(LINES, title="t", description="d")
    total = LINES[-1].at + HOLD
    shown = [float(share) for share in re.findall(r"@keyframes l\d+ \{ 0%, ([\d.]+)% \{ opacity: 0 \}", svg)]
    assert [round(share * total / 100, 1) for share in shown] == [line.at for line in LINES]
    assert svg.count(f"{total:.1f}s infinite") == len(LINES)


def test_the_last_frame_stands_still_for_readers_who_prefer_reduced_motion() -> None:
    svg = draw(LINES, title="t", description="d")
    assert re.search(r"prefers-reduced-motion: reduce\) \{ \.line \{ animation: none", svg)
    # Without the animation, nothing hides a line.
    assert not re.search(r'(style|class)="[^"]*opacity', svg)


def test_the_picture_of_the_readme_shows_the_takeover() -> None:
    shown = texts(PICTURE.read_text())
    order = ["kill -9", "died while it ran it", "attempt 2 of", "succeeded after"]
    found = [next(number for number, text in enumerate(shown) if part in text) for part in order]
    assert found == sorted(found)


def test_the_picture_of_the_readme_is_small_and_needs_nothing_else() -> None:
    svg = PICTURE.read_text()
    assert len(svg.encode()) <= MAX_BYTES
    assert re.findall(r"https?://[^\"\s]+", svg) == [NAMESPACE.strip("{}")]
    assert not re.search(r"<script|<foreignObject|@import|url\(", svg)
    # No path of the machine that recorded it.
    assert not re.search(r"(^|[\s'\"=])/(tmp|home|root|work|dev)\b", svg)
    root = ElementTree.fromstring(svg)  # noqa: S314 — our own
    assert root.find(f"{NAMESPACE}title") is not None
    assert root.find(f"{NAMESPACE}desc") is not None
