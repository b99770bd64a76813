"""Mutual exclusion of effects: runs write under one lock while a nemesis injects faults, and the effects are judged.

Six runs at a time take the lock again and again, on three instances, and leave an effect each time, guarded by its
token. Meanwhile instances are killed and replaced, frozen and thawed, links are cut, and the database crashes. The
verdict is read from the table of effects alone: in the order in which they were committed (`track_commit_timestamp`),
their tokens only grow. One effect for each time that the lock was held shows that the lock continues to be granted.

Without the guard, the nemesis finds a violation: a holder that was frozen commits late.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import LiteralString

import psycopg
from psycopg.rows import TupleRow

from tests.support.fleet import Fleet, InstanceProcess
from tests.support.postgres import Postgres, eventually
from tests.support.trial_actions import EFFECTS

CONFIGURATION = "track_commit_timestamp = on\nfsync = on\n"
INSTANCES = 3
# Each run strikes only this often, because a run fails after twenty instances have died while they executed it.
TIMES = 60
# Longer than the `ttl` of a lock, and sometimes longer than a lease: a frozen instance may or may not be declared gone.
FREEZE = (3.5, 7.0)
# How long a striker holds the lock before the guard.
DWELL = 0.005
# Longer than any step takes, also on a busy machine.
MAX_WAIT = 120.0

HOLDER = "SELECT pid FROM flotilla.service_locks WHERE instance_id IS NOT NULL AND pid = ANY (%s)"

# What to print if there is no progress.
DIAGNOSTICS: tuple[LiteralString, ...] = (
    "SELECT id, state, deaths, error FROM flotilla.runs WHERE state = 'running'",
    "SELECT state, count(*), max(error) FROM flotilla.finished_runs GROUP BY state",
    "SELECT * FROM flotilla.service_locks",
    "SELECT * FROM flotilla.lock_waiters",
    "SELECT id, name, state, heartbeat_at FROM flotilla.instances ORDER BY id DESC LIMIT 6",
)

IN_ORDER_OF_COMMIT = """
SELECT token, pg_xact_commit_timestamp(xmin)
FROM public.effects
WHERE note = 'struck'
ORDER BY pg_xact_commit_timestamp(xmin), n
"""


@dataclass
class Verdict:
    """The result, computed from the effects."""

    effects: int
    # Effects that were committed after an effect with a higher token, and effects with a token that another effect has.
    late: int
    twice: int
    ends: Counter[str]
    acts: Counter[str]
    seconds: float

    @property
    def exclusive(self) -> bool:
        return self.late == self.twice == 0

    def __str__(self) -> str:
        acts = ", ".join(f"{count} × {act}" for act, count in sorted(self.acts.items()))
        return (
            f"{self.effects} effects in {self.seconds:.0f} s, {self.late} after a later one, {self.twice} twice under "
            f"one token; {acts}; runs: {dict(self.ends)}"
        )


@dataclass
class Nemesis:
    """Injects faults into instances and their database; each call of `act` injects one."""

    postgres: Postgres
    fleet: Fleet
    instances: list[InstanceProcess]
    chance: random.Random
    acts: Counter[str] = field(default_factory=Counter)

    @property
    def kinds(self) -> dict[Callable[[], None], int]:
        """The kinds of faults, with their relative frequencies."""
        return {self.kill: 3, self.freeze: 4, self.cut: 2, self.crash: 1}

    @property
    def has_done_all(self) -> bool:
        return len(self.acts) == len(self.kinds)

    def act(self) -> None:
        """Inject a fault: first each kind once, then kinds at random with these frequencies."""
        kinds = self.kinds
        new = [kind for kind in kinds if kind.__name__ not in self.acts]
        (kind,) = self.chance.choices(new or list(kinds), [kinds[each] for each in new] or list(kinds.values()))
        kind()
        self.acts[kind.__name__] += 1

    def kill(self) -> None:
        victim = self.signal_holder(signal.SIGKILL)
        victim.process.wait()
        self.instances.remove(victim)
        self.instances.append(self.fleet.launch().wait_ready())

    def freeze(self) -> None:
        victim = self.signal_holder(signal.SIGSTOP)
        time.sleep(self.chance.uniform(*FREEZE))
        victim.thaw()

    def signal_holder(self, number: int) -> InstanceProcess:
        """Send a signal to the instance that holds the lock, which may have released it in the meantime."""
        by_pid = {instance.pid: instance for instance in self.instances}
        with psycopg.connect(self.postgres.address_of(), autocommit=True) as session:
            row = None
            while row is None:
                row = session.execute(HOLDER, [list(by_pid)]).fetchone()
            os.kill(row[0], number)
        return by_pid[row[0]]

    def cut(self) -> None:
        with psycopg.connect(self.postgres.address_of(), autocommit=True) as session:
            session.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '%%/link/%%'"
            )

    def crash(self) -> None:
        self.postgres.stop("immediate")
        self.postgres.start_again()


def strike(postgres: Postgres, folder: Path, *, rounds: int, calm: int, seed: int, guarded: bool = True) -> Verdict:
    """Let runs take the lock this often, with a fault after each `calm` effects, and return the verdict.

    It continues until there was a fault of each kind. The server must have `CONFIGURATION`.
    """
    address = postgres.address_of()
    chance = random.Random(seed)
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(f"{EFFECTS}; ALTER TABLE public.effects ADD COLUMN n bigserial")
    began = time.monotonic()
    with Fleet(address, folder, FLOTILLA_ACTIONS="tests.support.trial_actions") as fleet:
        nemesis = Nemesis(postgres, fleet, fleet.start(INSTANCES), chance)
        strike = {"action": "strike", "payload": {"times": TIMES, "dwell": DWELL, "guarded": guarded}}
        strikers: list[int] = []
        seen = 0
        while seen < rounds - calm or not nemesis.has_done_all:
            # The runs on the other instances continue while one is frozen, and may end before all faults have happened.
            missing = max(rounds, seen + 2 * calm) - len(strikers) * TIMES
            if missing > 0:
                strikers += nemesis.instances[-1].wait_ready().trigger_all([strike] * -(-missing // TIMES))
            seen = wait_for_effects(address, seen + calm)
            nemesis.act()
        last = nemesis.instances[-1].wait_ready()
        ends = Counter(last.ended(run_id, within=MAX_WAIT)["state"] for run_id in strikers)
    seconds = time.monotonic() - began
    with psycopg.connect(address) as session:
        return judge(session, ends, nemesis.acts, seconds)


def wait_for_effects(address: str, count: int) -> int:
    """Wait until there are at least this many effects, and return their number."""

    def count_effects() -> int | None:
        with psycopg.connect(address) as session:
            row = session.execute("SELECT count(*) FROM public.effects WHERE note = 'struck'").fetchone()
        assert row is not None
        return int(row[0]) if row[0] >= count else None

    try:
        return eventually(count_effects, within=MAX_WAIT)
    except AssertionError as stuck:
        with psycopg.connect(address) as session:
            for what in DIAGNOSTICS:
                stuck.add_note(f"{what}: {session.execute(what).fetchall()}")
        raise


def judge(session: psycopg.Connection[TupleRow], ends: Counter[str], acts: Counter[str], seconds: float) -> Verdict:
    tokens = [token for token, _ in session.execute(IN_ORDER_OF_COMMIT)]
    latest, late = 0, 0
    for token in tokens:
        late += token < latest
        latest = max(token, latest)
    return Verdict(len(tokens), late, len(tokens) - len(set(tokens)), ends, acts, seconds)
