"""Tests that repeat themselves: a few times with the others, and as often as it takes to be sure with `make long`."""

import os

LONG = os.environ.get("LONG") == "1"


def rounds(few: int, many: int) -> int:
    return many if LONG else few
