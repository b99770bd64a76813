"""What clients send, as types. Each field is checked here, once, before anything is written.

A value that PostgreSQL cannot store, or that Python cannot write again, is refused with 422 and the field's name: NUL
and other control characters in names and keys, instants that no time zone of PostgreSQL has, durations beyond any
calendar, numbers that JSON does not have. What the parser of JSON refuses as a whole is named `body`: integers of more
than 4,300 digits, more than 200 levels of nesting, halves of surrogate pairs, bytes that are no UTF-8.
"""

import json
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from app.fleet.coordination.locks.admin import MAX_REASON_LENGTH
from app.fleet.duration import MAX_AGE, format_duration, parse_duration
from app.fleet.engine.enqueue.trigger import EARLIEST, KEY_MOST, LATEST
from app.fleet.validation import MAX_NAME_LENGTH

strictly = json.JSONEncoder(allow_nan=False, check_circular=False).encode


def printable(text: str) -> str:
    if not text.isprintable():
        raise PydanticCustomError("printable", "must have printable characters only")
    return text


def finite(payload: Any) -> Any:
    """Refuse what Python reads as JSON and other parsers do not; written again, it would be null."""
    try:
        strictly(payload)
    except ValueError:
        raise PydanticCustomError("finite", "a number is infinite, or not a number: JSON has neither") from None
    return payload


def within_the_calendar(instant: datetime) -> datetime:
    """Return the instant in UTC: PostgreSQL knows no offset of 16 hours or more."""
    if not EARLIEST <= instant <= LATEST:
        raise PydanticCustomError("calendar", f"must be between the years {EARLIEST.year} and {LATEST.year}")
    return instant.astimezone(UTC)


def read_ago(given: object) -> timedelta | None:
    """Read `2h`, or a number of seconds."""
    if given is None:
        return None
    try:
        if isinstance(given, bool) or not isinstance(given, str | int | float):
            raise ValueError  # noqa: TRY301, TRY004 — refused below, like every other value that is no duration
        value = parse_duration(given)
    except ValueError:
        message = "must be a duration: a text such as '2h' or '1h30m', or a number of seconds"
        raise PydanticCustomError("duration", message) from None
    if not 0 <= value <= MAX_AGE:
        raise PydanticCustomError("duration", f"must be from 0 s to {format_duration(MAX_AGE)}")
    return timedelta(seconds=value)


Key = Annotated[str, Field(min_length=1, max_length=KEY_MOST), AfterValidator(printable)]
LockName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH), AfterValidator(printable)]
ReleaseReason = Annotated[str, Field(min_length=1, max_length=MAX_REASON_LENGTH), AfterValidator(printable)]
Payload = Annotated[Any, AfterValidator(finite)]
Instant = Annotated[AwareDatetime, AfterValidator(within_the_calendar)]
Ago = Annotated[timedelta | None, BeforeValidator(read_ago)]
