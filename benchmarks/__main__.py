"""`python -m benchmarks [NAME …] [--short]`: run the benchmarks, one after the other, and print what they found.

takeover    kill followers and leaders, and measure how long the others need to know and to replace
outage      how soon everyone is back after the database was away, and after an instance froze
start       how long `flotilla up` takes from nothing, and again
idle        what an idle cluster of 1, 5 and 10 instances sends to PostgreSQL
"""

import argparse
import sys

from benchmarks import idle, outage, start, takeover

ALL = {"takeover": takeover.run, "outage": outage.run, "start": start.run, "idle": idle.run}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(ALL)}; all without")
    parser.add_argument("--short", action="store_true", help="fewer rounds, to see that it works")
    given = parser.parse_args()
    if unknown := set(given.names) - set(ALL):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    for name in given.names or ALL:
        print(f"\n== {name} " + "=" * (70 - len(name)), flush=True)
        ALL[name](short=given.short)
    sys.stdout.flush()


main()
