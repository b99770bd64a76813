"""The types of the fields that clients send. Each field is checked here, before anything is written.

A value that PostgreSQL cannot store, or that Python cannot serialise again, is refused with 422 and the field's name:
control characters such as NUL in names and keys, instants outside the range of PostgreSQL, durations that are too long,
numbers that JSON does not have. If the JSON parser refuses the whole body, the name is `body`: integers of more than
4,300 digits, more than 200 levels of nesting, unpaired surrogates, bytes that are not UTF-8.
"""

import json
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from app.fleet.coordination.locks.admin import MAX_REASON_LENGTH
from app.fleet.duration import MAX_AGE, format_duration, parse_duration
from app.fleet.engine.enqueue.orders import EARLIEST_RUN_AT, LATEST_RUN_AT, MAX_KEY_LENGTH
from app.fleet.validation import MAX_NAME_LENGTH

strictly = json.JSONEncoder(allow_nan=False, check_circular=False).encode


def printable(text: str) -> str:
    if not text.isprintable():
        raise PydanticCustomError("printable", "must contain only printable characters")
    return text


def finite(payload: Any) -> Any:
    """Refuse NaN and infinity: Python reads them as JSON, other parsers do not, and pydantic would write null."""
    try:
        strictly(payload)
    except ValueError:
        raise PydanticCustomError("finite", "contains NaN or an infinite number, which JSON does not have") from None
    return payload


def within_range(instant: datetime) -> datetime:
    """Return the instant in UTC: PostgreSQL does not accept an offset of 16 hours or more."""
    if not EARLIEST_RUN_AT <= instant <= LATEST_RUN_AT:
        raise PydanticCustomError(
            "calendar", f"must be between the years {EARLIEST_RUN_AT.year} and {LATEST_RUN_AT.year}"
        )
    return instant.astimezone(UTC)


def read_ago(given: object) -> timedelta | None:
    """Parse a duration such as `2h`, or a number of seconds."""
    if given is None:
        return None
    try:
        if isinstance(given, bool) or not isinstance(given, str | int | float):
            raise ValueError  # noqa: TRY301, TRY004 — refused below, like every other invalid value
        value = parse_duration(given)
    except ValueError:
        message = "must be a duration: a text such as '2h' or '1h30m', or a number of seconds"
        raise PydanticCustomError("duration", message) from None
    if not 0 <= value <= MAX_AGE:
        raise PydanticCustomError("duration", f"must be from 0 s to {format_duration(MAX_AGE)}")
    return timedelta(seconds=value)


Key = Annotated[str, Field(min_length=1, max_length=MAX_KEY_LENGTH), AfterValidator(printable)]
LockName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH), AfterValidator(printable)]
ReleaseReason = Annotated[str, Field(min_length=1, max_length=MAX_REASON_LENGTH), AfterValidator(printable)]
Payload = Annotated[Any, AfterValidator(finite)]
Instant = Annotated[AwareDatetime, AfterValidator(within_range)]
Ago = Annotated[
    timedelta | None,
    BeforeValidator(read_ago),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "null"}]}),
    Field(description="A duration, such as `2h`, or a number of seconds"),
]
