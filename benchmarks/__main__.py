"""`python -m benchmarks [NAME …] [--short]`: run the benchmarks one after the other, and print the figures.

    name         what is measured                                                              the bar
    throughput   no-op runs claimed, executed and durably completed by one process; also       ≥ 40,000/s
                 bare SQL and the peers
    traces       the same without traces, with one run in a hundred traced, and with all
    ordered      the same with 1, 100 and 5,000 ordering keys, and with none; the last         ≥ 0.75
                 quarter of one key's runs against its first
    insert       runs inserted by POST /runs:batch, and by `trigger_many` in code              ≥ 20,000/s, ≥ 80,000/s
    once         new keys processed, 1,000 at a time and one by one; seen keys looked up       ≥ 50,000/s
    latency      from POST to the start of the action, on an idle cluster of three             p50 ≤ 5 ms, p99 ≤ 20 ms
    punctual     1,000 actions due in the same second, on three instances                      p99 ≤ 50 ms late, once
    rescue       SIGKILL of the instance that executes a run, until another one begins it      p99 ≤ 500 ms
    backlog      claims with ten million finished runs, and with a snapshot held open          ≤ 1.5 × an empty table
    streams      events written, and received by clients of another instance; 2,000 clients    ≥ 20,000/s; p50 ≤ 8 ms;
                 of two instances that follow 200 runs; memory per client                      p99 ≤ 250 ms; ≤ 60 KB
    locks        a lock without contention, one with a hundred contenders on three instances,  p50 ≤ 2 ms; p99 ≤ 20 ms;
                 a thousand locks of one instance; a singleton whose instance ends             1 renewal per heartbeat
    limits       1,000 permits a second for three instances together, and their cost           ± 1 %, ≤ 50 statements/s
    dashboard    its pages beside a million pending, ten million finished runs and 50           p99 ≤ 100 ms;
                 instances; the statements of 1, 10 and 50 viewers; no-op runs with 50 viewers  ≤ 5/s; ≥ 0.97
    idle         statements per second and CPU of 1, 10 and 50 instances without work          ≤ 2 follower, ≤ 10 leader
    takeover     SIGKILL of one of 3 and of 50 instances until it is declared gone, and until  p99 ≤ 500 ms
                 there is a new leader
    outage       all instances ready again after an outage of PostgreSQL; a frozen one gone    ≤ 3 s, ≤ 7 s
    start        `flotilla up` until three instances are ready, the first and the second time  ≤ 5 s the second time

All benchmarks run on two cores, on the embedded PostgreSQL 18 with durability on; their modules describe the rest.
Other processes on the machine change the figures, so let it be idle. `make bench` installs the peers first.
"""

import argparse
import logging
import time

from benchmarks import (
    backlog,
    conditions,
    dashboard,
    idle,
    insert,
    latency,
    limits,
    locks,
    once,
    ordered,
    outage,
    punctual,
    rescue,
    start,
    streams,
    takeover,
    throughput,
    traces,
)
from benchmarks.conditions import two_cores
from tests.support import fleet
from tests.support.fork_server import ForkServer

ALL = {
    "throughput": throughput.run,
    "traces": traces.run,
    "ordered": ordered.run,
    "insert": insert.run,
    "once": once.run,
    "latency": latency.run,
    "punctual": punctual.run,
    "rescue": rescue.run,
    "backlog": backlog.run,
    "streams": streams.run,
    "locks": locks.run,
    "limits": limits.run,
    "dashboard": dashboard.run,
    "idle": idle.run,
    "takeover": takeover.run,
    "outage": outage.run,
    "start": start.run,
}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks (default: all)")
    parser.add_argument("--short", action="store_true", help="run fewer rounds, only to check that the benchmarks work")
    given = parser.parse_args()
    if unknown := set(given.names) - set(ALL):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    two_cores()
    if given.short:
        # A short round only checks that the benchmark works, so its instances may be forked, on a new server.
        fleet.fork_server = ForkServer()
        conditions.SEGMENTS = 0
    # A service in this process configures its logging, which would then log all our requests.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for name in given.names or ALL:
        print(f"\n== {name} " + "=" * (70 - len(name)), flush=True)
        began = time.monotonic()
        ALL[name](short=given.short)
        print(f"({time.monotonic() - began:.0f} s)", flush=True)


main()
