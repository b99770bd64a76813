"""`python -m tests.chaos [exclusion|attrition] …`: the long runs, as `make chaos`.

exclusion [--rounds N] [--seed N] [--without-guard]
    Exits with 0 if, with the guard, no effect was committed late, or if, without the guard, at least one was.
attrition [--seconds N] [--rate N]
    Exits with 0 if no effect was lost or doubled, no connection is missing, and each phase kept up its rate.
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from tests.chaos import attrition
from tests.chaos.exclusion import CONFIGURATION, strike
from tests.support.postgres import server

# Effects between two acts of the nemesis.
CALM = 150


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Long runs with faults.")
    parser.add_argument("program", nargs="?", choices=["exclusion", "attrition"], default="exclusion")
    parser.add_argument("--rounds", type=int, default=10_000, help="exclusion: how often the lock is taken")
    parser.add_argument("--seed", type=int, default=20, help="exclusion: seed of the random faults")
    parser.add_argument(
        "--without-guard", action="store_true", help="exclusion: show that effects are committed late without the guard"
    )
    parser.add_argument("--seconds", type=float, default=180, help="attrition: how long each phase lasts")
    parser.add_argument("--rate", type=int, default=600, help="attrition: runs a second")
    given = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    sys.exit(not (wears(given) if given.program == "attrition" else excludes(given)))


def excludes(given: argparse.Namespace) -> bool:
    with server(configuration=CONFIGURATION) as postgres, tempfile.TemporaryDirectory() as folder:
        verdict = strike(
            postgres, Path(folder), rounds=given.rounds, calm=CALM, seed=given.seed, guarded=not given.without_guard
        )
    sys.stdout.write(f"{verdict}\n")
    return bool(verdict.exclusive != given.without_guard)


def wears(given: argparse.Namespace) -> bool:
    with server(configuration=attrition.CONFIGURATION) as postgres, tempfile.TemporaryDirectory() as folder:
        verdict = attrition.wear(postgres, Path(folder), seconds=given.seconds, rate=given.rate)
    sys.stdout.write(f"{verdict}\n")
    return verdict.correct and verdict.keeps_up


if __name__ == "__main__":
    main()
