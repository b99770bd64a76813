"""`python -m tests.chaos [--rounds N] [--seed N] [--without-guard]`: the long run of mutual exclusion, as `make chaos`.

Ends with 0 if the effects say what they should: with the guard, that nothing came late; without it, that something did.
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from tests.chaos.exclusion import CONFIGURATION, strike
from tests.support.postgres import server

# Effects between two acts of the nemesis.
CALM = 150


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Mutual exclusion of effects.")
    parser.add_argument("--rounds", type=int, default=10_000, help="how often the lock is taken")
    parser.add_argument("--seed", type=int, default=20, help="of what the nemesis does")
    parser.add_argument("--without-guard", action="store_true", help="show that effects come late then")
    given = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with server(configuration=CONFIGURATION) as postgres, tempfile.TemporaryDirectory() as folder:
        verdict = strike(
            postgres, Path(folder), rounds=given.rounds, calm=CALM, seed=given.seed, guarded=not given.without_guard
        )
    sys.stdout.write(f"{verdict}\n")
    sys.exit(verdict.exclusive == given.without_guard)


if __name__ == "__main__":
    main()
