"""What a service's code gives to `lock`, `limit`, `breaker` and `once`, checked before anything is written."""

from app.fleet.duration import Duration, seconds, written
from app.fleet.errors import FleetError

NAME_MOST = 200
LONGEST = 366 * 86400.0


def check_name(what: str, name: str, refusal: type[FleetError]) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= NAME_MOST or not name.isprintable():
        raise refusal(f"the name of a {what} has from 1 to {NAME_MOST} printable letters")


def check_count(option: str, count: int, most: int, refusal: type[FleetError]) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= most:
        raise refusal(f"`{option}` is {count!r}, and must be a whole number from 1 to {most}")


def duration(option: str, given: Duration, refusal: type[FleetError], least: float = 0.0) -> float:
    """Read a duration of at most a year."""
    try:
        value = seconds(given)
    except ValueError as error:
        raise refusal(f"`{option}`: {error}") from None
    if not least <= value <= LONGEST:
        raise refusal(f"`{option}` is {value:g} s, and must be from {written(least)} to {written(LONGEST)}")
    return value
