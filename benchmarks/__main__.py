"""`python -m benchmarks [NAME …] [--short]`: run the benchmarks, one after the other, and print what they found.

    name         what is measured                                                              the bar
    throughput   no-op runs claimed, run and durably completed by one process; bare SQL        ≥ 40,000/s
                 and the peers beside it
    lines        the same in one line, 100 and 5,000, beside none; a long line's last quarter   ≥ 0.75 of its first
    insert       runs put in by POST /runs:batch, and by `trigger_many` in code                ≥ 20,000/s, ≥ 80,000/s
    once         keys taken and made seen, 1,000 at a time and one by one; asked for again      ≥ 50,000/s
    latency      from POST to the start of the action, on an idle cluster of three             p50 ≤ 5 ms, p99 ≤ 20 ms
    punctual     1,000 actions due in the same second, on three instances                      p99 ≤ 50 ms late, once
    rescue       SIGKILL of the instance with a run, until the run begins elsewhere            p99 ≤ 500 ms
    backlog      claims beside ten million finished runs, and under a held snapshot            ≤ 1.5 × an empty table
    streams      events written, and seen by clients elsewhere; 2,000 clients of two            ≥ 20,000/s; p50 ≤ 8 ms;
                 instances following 200 runs; memory of a client                              p99 ≤ 250 ms; ≤ 60 KB
    locks        a lock that nobody else wants, one that a hundred want on three instances,    p50 ≤ 2 ms; p99 ≤ 20 ms;
                 and a thousand held by one; a singleton whose instance is killed, or leaves   one renewal a beat
    limits       1,000 permits a second for three instances together; what it costs            ± 1 %, ≤ 50 statements/s
    idle         statements per second of 1, 5 and 20 instances without work                   ≤ 2 follower, ≤ 10 leader
    takeover     SIGKILL of an instance until it is declared gone, and until another leads     p99 ≤ 500 ms
    outage       everyone ready again after the database was away; a frozen instance gone      ≤ 3 s, ≤ 7 s
    start        `flotilla up` until three are ready, from nothing and again                   ≤ 5 s again

Everything runs on two cores, on the embedded PostgreSQL 18 with durability on; each says what else holds for it. Other
work on the machine is measured too: leave it alone meanwhile. `make bench` installs the peers first.
"""

import argparse
import logging
import time

from benchmarks import (
    backlog,
    conditions,
    idle,
    insert,
    latency,
    limits,
    lines,
    locks,
    once,
    outage,
    punctual,
    rescue,
    start,
    streams,
    takeover,
    throughput,
)
from benchmarks.conditions import two_cores
from tests.support import fleet
from tests.support.fork_server import ForkServer

ALL = {
    "throughput": throughput.run,
    "lines": lines.run,
    "insert": insert.run,
    "once": once.run,
    "latency": latency.run,
    "punctual": punctual.run,
    "rescue": rescue.run,
    "backlog": backlog.run,
    "streams": streams.run,
    "locks": locks.run,
    "limits": limits.run,
    "idle": idle.run,
    "takeover": takeover.run,
    "outage": outage.run,
    "start": start.run,
}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all without")
    parser.add_argument("--short", action="store_true", help="fewer rounds, to see that it works")
    given = parser.parse_args()
    if unknown := set(given.names) - set(ALL):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    two_cores()
    if given.short:
        # A short round only checks that the benchmark works, so its instances may be forked, on a new server.
        fleet.fork_server = ForkServer()
        conditions.SEGMENTS = 0
    # The service configures the log of the process it is in, and then every request of ours is in it.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for name in given.names or ALL:
        print(f"\n== {name} " + "=" * (70 - len(name)), flush=True)
        began = time.monotonic()
        ALL[name](short=given.short)
        print(f"({time.monotonic() - began:.0f} s)", flush=True)


main()
