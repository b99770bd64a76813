"""JSON in rows: only values that every reader can read may be written.

PostgreSQL stores a value of type `json` as it was sent, and it accepts values that Python cannot read: integers of more
than 4,300 digits, and values nested so deep that the JSON library fails (255 when it writes the response). One such
value would break every page that contains it. So it is refused when it is written (`why_unreadable`), and left out if a
row has one all the same (`StoredJsonLoader`).
"""

import json
import re
from itertools import accumulate
from typing import Any

from psycopg.abc import Buffer
from psycopg.adapt import Loader

# Python's own limit on the digits of an integer.
MAX_DIGITS = 4300
# Nested arrays and objects.
MAX_DEPTH = 200

STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
# The lookbehind prevents a search from each digit of a long integer.
LONG_INTEGER = re.compile(rf"(?<![0-9])[0-9]{{{MAX_DIGITS + 1}}}")
NO_BRACKET = re.compile(r"[^][{}]+")


def why_unreadable(text: str) -> str | None:
    """Return why this JSON is unreadable; None if it is readable."""
    if len(text) > MAX_DIGITS and LONG_INTEGER.search(text) and LONG_INTEGER.search(STRING.sub('""', text)):
        return f"it has an integer of more than {MAX_DIGITS} digits"
    if text.count("[") + text.count("{") > MAX_DEPTH and depth(text) > MAX_DEPTH:
        return f"it is nested more than {MAX_DEPTH} deep"
    return None


def depth(text: str) -> int:
    brackets = NO_BRACKET.sub("", STRING.sub("", text))
    return max(accumulate(1 if each in "[{" else -1 for each in brackets), default=0)


class StoredJsonLoader(Loader):
    """Reads stored JSON; returns a text with the reason instead of an unreadable value."""

    def load(self, data: Buffer) -> Any:
        text = bytes(data).decode()
        if why := why_unreadable(text):
            return f"(left out: {why})"
        return json.loads(text)
