"""JSON that is kept in a row: what may be written, so that every reader can read it again.

PostgreSQL keeps a text of type `json` as it was sent, and takes more than its readers do. Python reads no integer of
more than 4,300 digits, and what serves it to clients writes nothing that is nested more than 255 deep. One such value
would make an error of every page that it stands on. So it is refused when it is written (`why_unreadable`), and left
out when a row has it all the same (`StoredJsonLoader`).
"""

import json
import re
from itertools import accumulate
from typing import Any

from psycopg.abc import Buffer
from psycopg.adapt import Loader

# Python's own limit for the digits of an integer.
DIGITS_MOST = 4300
# Of arrays and objects within each other.
DEEPEST = 200

STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
# Looked for from the first digit on, and not again from each of the following.
LONG_INTEGER = re.compile(rf"(?<![0-9])[0-9]{{{DIGITS_MOST + 1}}}")
NO_BRACKET = re.compile(r"[^][{}]+")


def why_unreadable(text: str) -> str | None:
    """Say what in this JSON no reader could read; None if there is nothing."""
    if len(text) > DIGITS_MOST and LONG_INTEGER.search(text) and LONG_INTEGER.search(STRING.sub('""', text)):
        return f"it has an integer of more than {DIGITS_MOST} digits"
    if text.count("[") + text.count("{") > DEEPEST and depth(text) > DEEPEST:
        return f"it is nested more than {DEEPEST} deep"
    return None


def depth(text: str) -> int:
    brackets = NO_BRACKET.sub("", STRING.sub("", text))
    return max(accumulate(1 if each in "[{" else -1 for each in brackets), default=0)


class StoredJsonLoader(Loader):
    """Reads what is stored; instead of what cannot be read, it gives a text that says why not."""

    def load(self, data: Buffer) -> Any:
        text = bytes(data).decode()
        if why := why_unreadable(text):
            return f"(left out: {why})"
        return json.loads(text)
