"""Mutual exclusion of effects: some strike under one lock, a nemesis does its worst, and the effects decide.

Six runs at a time take the lock again and again, on three instances, and leave an effect each time, guarded by its
token. Meanwhile instances are killed and replaced, frozen and thawed, links are cut, and the database crashes. The
verdict is read from the table of effects alone: in the order in which they were committed (`track_commit_timestamp`),
their tokens only ever grow. That an effect is there at all, once for each time that the lock was held, says that the
lock goes on.

Taken out, the guard leaves a hole that the nemesis finds: a holder that was frozen commits late.
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
# Each run strikes so often and no more: a run that was at work when twenty instances died has failed.
TIMES = 60
# Longer than a lock's `ttl`, and some longer than a lease too: who was frozen may or may not be declared gone.
FREEZE = (3.5, 7.0)
# How long a striker holds the lock before the guard.
DWELL = 0.005
# More than anything here may take, on a machine that is busy.
STUCK = 120.0

HOLDER = "SELECT pid FROM flotilla.service_locks WHERE instance_id IS NOT NULL AND pid = ANY (%s)"

# What is worth knowing when nothing goes on.
STANDING: tuple[LiteralString, ...] = (
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
    """What the effects say."""

    effects: int
    # Effects that were committed after one with a later token, and those whose token had one before.
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
    """What happens to instances and to their database, at the moments it is told to act."""

    postgres: Postgres
    fleet: Fleet
    instances: list[InstanceProcess]
    chance: random.Random
    acts: Counter[str] = field(default_factory=Counter)

    @property
    def kinds(self) -> dict[Callable[[], None], int]:
        """What it may do, and how often beside the others."""
        return {self.kill: 3, self.freeze: 4, self.cut: 2, self.crash: 1}

    @property
    def has_done_all(self) -> bool:
        return len(self.acts) == len(self.kinds)

    def act(self) -> None:
        """Do something: each of them once, and then some more often than others."""
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
        """Hit whoever holds the lock; by then it may just have passed it on."""
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
    """Have the lock taken so often, and judge; with an act of the nemesis for each `calm` effects.

    It goes on until each kind of act has been there.

    The server must have `CONFIGURATION`.
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
            # Who strikes on while somebody is frozen may be done before everything has happened.
            missing = max(rounds, seen + 2 * calm) - len(strikers) * TIMES
            if missing > 0:
                strikers += nemesis.instances[-1].wait_ready().trigger_all([strike] * -(-missing // TIMES))
            seen = until(address, seen + calm)
            nemesis.act()
        last = nemesis.instances[-1].wait_ready()
        ends = Counter(last.ended(run_id, within=STUCK)["state"] for run_id in strikers)
    seconds = time.monotonic() - began
    with psycopg.connect(address) as session:
        return judge(session, ends, nemesis.acts, seconds)


def until(address: str, count: int) -> int:
    """Wait until there are so many effects, and say how many."""

    def look() -> int | None:
        with psycopg.connect(address) as session:
            row = session.execute("SELECT count(*) FROM public.effects WHERE note = 'struck'").fetchone()
        assert row is not None
        return int(row[0]) if row[0] >= count else None

    try:
        return eventually(look, within=STUCK)
    except AssertionError as stuck:
        with psycopg.connect(address) as session:
            for what in STANDING:
                stuck.add_note(f"{what}: {session.execute(what).fetchall()}")
        raise


def judge(session: psycopg.Connection[TupleRow], ends: Counter[str], acts: Counter[str], seconds: float) -> Verdict:
    tokens = [token for token, _ in session.execute(IN_ORDER_OF_COMMIT)]
    latest, late = 0, 0
    for token in tokens:
        late += token < latest
        latest = max(token, latest)
    return Verdict(len(tokens), late, len(tokens) - len(set(tokens)), ends, acts, seconds)
