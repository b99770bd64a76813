"""Checks of what callers pass in, before anything is written.

`check_name`, `check_count` and `check_duration` check the arguments of `lock`, `limit`, `breaker` and `once`.
`invalid_parts` lists what pydantic found wrong with a value. The list is bounded: pydantic formats all errors at once,
which takes seconds and hundreds of megabytes for a list of half a million wrong values. Above `MAX_LISTED_ERRORS`, only
their number is reported.
"""

from typing import NamedTuple

from pydantic import ValidationError

from app.fleet.duration import MAX_DURATION, Duration, format_duration, parse_duration
from app.fleet.errors import FleetError

MAX_NAME_LENGTH = 200
MAX_LISTED_ERRORS = 1000


def check_name(kind: str, name: str, error: type[FleetError]) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise error(f"the name of a {kind} must have from 1 to {MAX_NAME_LENGTH} printable characters")


def check_count(option: str, count: int, maximum: int, error: type[FleetError]) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= maximum:
        raise error(f"`{option}` is {count!r}, and must be a whole number from 1 to {maximum}")


def check_duration(option: str, given: Duration, error: type[FleetError], minimum: float = 0.0) -> float:
    """Return the duration in seconds: from `minimum` to a year."""
    try:
        seconds = parse_duration(given)
    except ValueError as wrong:
        raise error(f"`{option}`: {wrong}") from None
    if not minimum <= seconds <= MAX_DURATION:
        bounds = f"from {format_duration(minimum)} to {format_duration(MAX_DURATION)}"
        raise error(f"`{option}` is {seconds:g} s, and must be {bounds}")
    return seconds


class InvalidPart(NamedTuple):
    """A part of a value that is wrong: its location in the value, and why. The value itself is not repeated."""

    location: tuple[str | int, ...]
    message: str


def invalid_parts(error: ValidationError) -> list[InvalidPart]:
    if error.error_count() > MAX_LISTED_ERRORS:
        message = f"{error.error_count()} values in it are invalid; above {MAX_LISTED_ERRORS}, they are not listed"
        return [InvalidPart((), message)]
    details = error.errors(include_url=False, include_input=False, include_context=False)
    return [InvalidPart(each["loc"], each["msg"]) for each in details]
