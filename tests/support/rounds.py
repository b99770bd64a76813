"""How often a test repeats what is random: a third of the rounds in `make test`, all of them in `make chaos`."""

import os


def rounds(number: int) -> int:
    return number if os.environ.get("ALL_ROUNDS") else -(-number // 3)
