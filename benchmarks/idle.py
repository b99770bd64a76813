"""The cost of an idle cluster: statements per second by role, sessions, and CPU, of the instances and of PostgreSQL.

The statements are counted in the server's log of statements. The CPU is what the kernel has counted for the processes,
as the share of one core.
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.conditions import ACTIONS, start_in_waves
from benchmarks.report import verdict
from tests.instances.test_cost import CONFIGURATION, statements
from tests.support.fleet import Fleet, leader_of
from tests.support.postgres import Postgres, server

SIZES = (1, 10, 50)
SETTLED = 5.0
WATCHED = 20.0
MAX_FOLLOWER = 2.0
MAX_LEADER = 10.0
# In /proc/PID/stat, counted after the name of the program.
PARENT, USER_TICKS, SYSTEM_TICKS, CHILDREN_USER_TICKS, CHILDREN_SYSTEM_TICKS = 1, 11, 12, 13, 14


def run(*, short: bool) -> None:
    sizes, settled, watched = ((2,), 1.0, 2.0) if short else (SIZES, SETTLED, WATCHED)
    print(f"{'':>9}  {'statements a second':>42}  {'':>8}  {'% of a core':>22}")
    print(
        f"{'instances':>9}  {'all':>8}  {'the leader':>10}  {'a follower':>10}  {'highest':>8}  {'sessions':>8}  "
        f"{'an instance':>11}  {'PostgreSQL':>10}   (leader ≤ {MAX_LEADER:.0f}, each follower ≤ {MAX_FOLLOWER:.0f})"
    )
    for size in sizes:
        print(watch(size, settled, watched), flush=True)


def watch(size: int, settled: float, watched: float) -> str:
    """Start instances, let them idle, and count their statements and their CPU."""
    with (
        server(configuration=CONFIGURATION) as postgres,
        tempfile.TemporaryDirectory() as folder,
        Fleet(postgres.address_of(), Path(folder), FLOTILLA_ACTIONS=ACTIONS) as fleet,
    ):
        instances = start_in_waves(fleet, size)
        leader = leader_of(instances).me()["name"]
        names = {instance.me()["name"] for instance in instances}
        pids = [instance.pid for instance in instances]
        time.sleep(settled)
        with postgres.session() as session:
            row = session.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'flotilla/%'"
            ).fetchone()
        assert row is not None
        before, own_cpu, server_cpu = statements(postgres.log), cpu_seconds(pids), cpu_seconds_of(postgres)
        time.sleep(watched)
        own_cpu, server_cpu = cpu_seconds(pids) - own_cpu, cpu_seconds_of(postgres) - server_cpu
        sent = statements(postgres.log)
        sent.subtract(before)
    by_instance: Counter[str] = Counter()
    for (_, who), count in sent.items():
        by_instance[who] += count
    total = sum(by_instance.values()) / watched
    own = by_instance.pop(leader) / watched
    # Statements of the pool do not have an instance's name: they are divided among all instances.
    nameless = sum(count for who, count in by_instance.items() if who not in names) / watched / size
    rest = [by_instance[name] / watched + nameless for name in names if name != leader]
    each = sum(rest) / len(rest) if rest else 0.0
    highest = max(rest, default=0.0)
    kept = verdict(own + nameless <= MAX_LEADER and highest <= MAX_FOLLOWER)
    return (
        f"{size:>9}  {total:>8.2f}  {own + nameless:>10.2f}  {each:>10.2f}  {highest:>8.2f}  {row[0]:>8}  "
        f"{own_cpu / watched / size:>11.2%}  {server_cpu / watched:>10.2%}   {kept}"
    )


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of processes, user and system."""
    return sum(sum(stat(pid)[USER_TICKS : SYSTEM_TICKS + 1]) for pid in pids) / os.sysconf("SC_CLK_TCK")


def cpu_seconds_of(postgres: Postgres) -> float:
    """Return the CPU time of a server: its main process, its sessions, and those that have ended."""
    main = int((postgres.data / "postmaster.pid").read_text().split()[0])
    running = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    sessions = [pid for pid in running if parent_of(pid) == main]
    ended = sum(stat(main)[CHILDREN_USER_TICKS : CHILDREN_SYSTEM_TICKS + 1]) / os.sysconf("SC_CLK_TCK")
    return cpu_seconds([main, *sessions]) + ended


def parent_of(pid: int) -> int | None:
    try:
        return stat(pid)[PARENT]
    except OSError:
        # It has ended meanwhile.
        return None


def stat(pid: int) -> list[int]:
    """Return the numbers about a process, in the order of proc(5); the first is its state, and no number."""
    _, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [0, *map(int, numbers)]
