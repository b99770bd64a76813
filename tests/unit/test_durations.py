"""Durations as people write them are read, and whatever else is given is refused in words, and shortly."""

from datetime import timedelta

import pytest
import typer

from app.fleet.cli.runs import ago
from app.fleet.duration import seconds


@pytest.mark.parametrize(
    ("given", "read"), [("90s", 90), ("1h30m", 5400), ("500ms", 0.5), (2, 2), (timedelta(minutes=1), 60)]
)
def test_a_duration_is_read(given: object, read: float) -> None:
    assert seconds(given) == read  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["", "soon", "1", "9" * 4000, "9" * 4000 + "s", 10**400, True])
def test_whatever_is_no_duration_is_refused_in_few_words(given: object) -> None:
    with pytest.raises(ValueError, match="duration") as refused:
        seconds(given)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("given", ["4000d", "9" * 90 + "d", "9" * 4000 + "s", "soon"])
def test_the_command_line_refuses_what_was_longer_ago_than_any_run(given: str) -> None:
    with pytest.raises(typer.BadParameter):
        ago("--since", given)
