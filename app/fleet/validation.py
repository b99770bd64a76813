"""What pydantic has found wrong with a value, in a bounded list.

pydantic writes all errors out at once, which takes seconds and hundreds of megabytes for a list of half a million wrong
values. Beyond `PARTS_MOST`, their number is all that is said.
"""

from typing import NamedTuple

from pydantic import ValidationError

PARTS_MOST = 1000


class Part(NamedTuple):
    """One thing that is wrong: where in the value, and what. What was given is not repeated."""

    place: tuple[str | int, ...]
    message: str


def wrong_parts(error: ValidationError) -> list[Part]:
    if error.error_count() > PARTS_MOST:
        return [Part((), f"{error.error_count()} values in it do not fit; of more than {PARTS_MOST} none is listed")]
    details = error.errors(include_url=False, include_input=False, include_context=False)
    return [Part(each["loc"], each["msg"]) for each in details]
