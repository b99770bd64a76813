"""A duration is parsed in each supported form; any other value is refused with a short message."""

from datetime import timedelta

import pytest
import typer

from app.fleet.cli.runs import parse_age
from app.fleet.duration import parse_duration


@pytest.mark.parametrize(
    ("given", "read"), [("90s", 90), ("1h30m", 5400), ("500ms", 0.5), (2, 2), (timedelta(minutes=1), 60)]
)
def test_a_duration_is_parsed(given: object, read: float) -> None:
    assert parse_duration(given) == read  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["", "soon", "1", "9" * 4000, "9" * 4000 + "s", 10**400, True])
def test_a_value_that_is_not_a_duration_is_refused_with_a_short_message(given: object) -> None:
    with pytest.raises(ValueError, match="duration") as refused:
        parse_duration(given)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("given", ["4000d", "9" * 90 + "d", "9" * 4000 + "s", "soon"])
def test_the_command_line_refuses_a_duration_that_goes_back_too_far(given: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_age("--since", given)
