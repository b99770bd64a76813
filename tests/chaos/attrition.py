"""Attrition: two instances that are not replaced execute runs while connections break, and must not wear out.

Runs are triggered at a steady rate, and each writes a row: every other one in the transaction that completes it
(`run.commit`), the rest in a guarded session of their own. One phase after the other:

    phase        what happens
    calm         nothing: the rate that the others are compared with
    terminated   all backends of the database are terminated every two seconds
    crashed      PostgreSQL crashes and is started again, five times
    idle         one run in 300 leaves its transaction idle until PostgreSQL ends the session
    cancelled    one run in ten is cancelled at a random moment of its transaction

The verdict is computed from rows. Each acknowledged run has succeeded; each run with `run.commit` has exactly one row,
each other run at least one. A phase keeps up if its rate, outside of the outages themselves, is at least `KEEPS_UP` of
the calm one, and if the first row after each outage comes within `BACK_WITHIN` seconds. At the end all connections are
back in their pools, and both original processes are still running.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self

import httpx
import psycopg

from tests.support.fleet import NO_TRUST, Fleet, InstanceProcess
from tests.support.postgres import Postgres, eventually
from tests.support.trial_actions import EFFECTS

CONFIGURATION = "fsync = on\n"
INSTANCES = 2
CRASHES = 5
TERMINATE_EVERY = 2.0
KEEPS_UP = 0.9
BACK_WITHIN = 2.0
# How often runs are triggered, all of one interval in one request.
BEAT = 0.1
# Longer than any step takes, also on a busy machine.
MAX_WAIT = 120.0
# One run in this many has the trouble of its phase. An idle run holds a session for more than a second, and an instance
# lends five sessions: more idle runs would measure this limit, and not whether the connections come back.
TROUBLED = {"idle": 300, "cancelled": 10}
SETTINGS = {"FLOTILLA_STATEMENT_TIMEOUT": "1", "FLOTILLA_POOL_MAX": "10", "FLOTILLA_CONCURRENCY": "100"}

TERMINATE = """
SELECT pg_terminate_backend(pid)
FROM pg_stat_activity
WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""
ROWS = """
SELECT run_id, note, extract(epoch FROM at)::float8
FROM public.effects
ORDER BY at
"""
ENDS = "SELECT id, state FROM flotilla.finished_runs WHERE id = ANY(%s)"


@dataclass
class Phase:
    name: str
    began: float = 0.0
    ended: float = 0.0
    # When the database stopped or broke its connections, and when it was back, on the clock of this machine.
    outages: list[tuple[float, float]] = field(default_factory=list)
    rate: float = 0.0
    back: list[float] = field(default_factory=list)


@dataclass
class Verdict:
    phases: list[Phase]
    triggered: int
    ends: Counter[str]
    missing: int
    doubled: int
    connections_out: bool
    same_processes: bool
    settings: dict[str, str]

    @property
    def correct(self) -> bool:
        """The conditions that hold on any machine, also on a busy one."""
        succeeded = self.ends == {"succeeded": self.triggered}
        return succeeded and self.missing == self.doubled == 0 and not self.connections_out and self.same_processes

    @property
    def keeps_up(self) -> bool:
        calm = self.phases[0].rate
        return all(
            phase.rate >= KEEPS_UP * calm and max(phase.back, default=0.0) <= BACK_WITHIN for phase in self.phases
        )

    def __str__(self) -> str:
        calm = self.phases[0].rate
        lines = [", ".join(f"{name}={value}" for name, value in self.settings.items())]
        for phase in self.phases:
            back = f", back after {max(phase.back):.2f} s at most ({len(phase.back)} times)" if phase.back else ""
            lines.append(f"{phase.name:<11} {phase.rate:6.0f} runs/s, {phase.rate / (calm or 1):4.0%} of calm{back}")
        lines.append(
            f"{self.triggered} runs triggered: {dict(self.ends)}, {self.missing} without row, {self.doubled} doubled; "
            f"connections out at the end: {'some' if self.connections_out else 'none'}; "
            f"{'both processes lived on' if self.same_processes else 'a process ended'}"
        )
        return "\n".join(lines)


class Producer:
    """Triggers runs at a steady rate until it is stopped. Unacknowledged runs are sent again with the same keys."""

    def __init__(self, instances: Sequence[InstanceProcess], rate: int) -> None:
        self.phase = "calm"
        # By the id of a run: whether its row is written by `run.commit`.
        self.acknowledged: dict[int, bool] = {}
        self._instances = instances
        self._rate = rate
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="producer")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            numbers = count()
            began, sent = time.monotonic(), 0
            with httpx.Client(timeout=10, verify=NO_TRUST) as client:
                while not self._stopping.wait(BEAT):
                    due = int((time.monotonic() - began) * self._rate) - sent
                    # After an outage, the missed runs are not all sent at once.
                    orders = [self._order(next(numbers)) for _ in range(min(due, self._rate))]
                    sent += due
                    if orders:
                        self._send(client, orders)
        except BaseException as failure:
            self._failure = failure
            raise

    def _order(self, number: int) -> dict[str, Any]:
        # In pairs, so that runs of both kinds have the trouble.
        trouble = self.phase if (every := TROUBLED.get(self.phase)) and number // 2 % every == 0 else None
        return {"action": "wear", "key": f"wear-{number}", "payload": {"commit": number % 2 == 0, "trouble": trouble}}

    def _send(self, client: httpx.Client, orders: list[dict[str, Any]]) -> None:
        for attempt in count():
            instance = self._instances[attempt % len(self._instances)]
            try:
                answer = client.post(f"{instance.url}/runs:batch", json={"runs": orders})
            except httpx.TransportError:
                pass
            else:
                # 200: the runs exist already, because the answer to an earlier attempt was lost.
                if answer.status_code in {200, 202}:
                    break
                assert answer.status_code >= 500, answer.text
            # Sooner than `Retry-After` says, because the time until the service is back is measured.
            time.sleep(BEAT)
        for order, run in zip(orders, answer.json()["runs"], strict=True):
            self.acknowledged[run["id"]] = order["payload"]["commit"]


def wear(
    postgres: Postgres, folder: Path, *, seconds: float, rate: int, settings: dict[str, str] | None = None
) -> Verdict:
    """Run all phases, each for this many seconds, and return the verdict."""
    address = postgres.address_of()
    given = {**SETTINGS, **(settings or {})}
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(f"{EFFECTS}; ALTER TABLE public.effects ADD COLUMN at timestamptz DEFAULT clock_timestamp()")
    with Fleet(address, folder, FLOTILLA_ACTIONS="tests.support.trial_actions", **given) as fleet:
        instances = fleet.start(INSTANCES)
        phases = []
        with Producer(instances, rate) as producer:
            for name, work in PHASES.items():
                producer.phase = name
                phase = Phase(name, began=time.time())
                work(postgres, phase, phase.began + seconds)
                phase.ended = time.time()
                phases.append(phase)
        wait_until_all_have_ended(address)
        out = [not all_connections_come_back(instance) for instance in instances]
        lived = all(instance.process.poll() is None for instance in instances)
        with psycopg.connect(address) as session:
            return judge(session, phases, producer.acknowledged, {**given, "rate": str(rate)}, any(out), lived)


# -- the phases -------------------------------------------------------------------------------------------------------


def nothing(_: Postgres, __: Phase, until: float) -> None:
    time.sleep(max(0.0, until - time.time()))


def terminated(postgres: Postgres, phase: Phase, until: float) -> None:
    while time.time() < until:
        with postgres.session() as session:
            session.execute(TERMINATE)
        now = time.time()
        phase.outages.append((now, now))
        time.sleep(TERMINATE_EVERY)


def crashed(postgres: Postgres, phase: Phase, until: float) -> None:
    pause = (until - time.time()) / (CRASHES + 1)
    for _ in range(CRASHES):
        # So that the phase has a rate between its outages.
        time.sleep(pause)
        away = time.time()
        postgres.stop("immediate")
        postgres.start_again()
        phase.outages.append((away, time.time()))
    time.sleep(pause)


PHASES: dict[str, Callable[[Postgres, Phase, float], None]] = {
    "calm": nothing,
    "terminated": terminated,
    "crashed": crashed,
    "idle": nothing,
    "cancelled": nothing,
}


# -- the verdict ------------------------------------------------------------------------------------------------------


def wait_until_all_have_ended(address: str) -> None:
    def none_is_left() -> bool:
        with psycopg.connect(address) as session:
            return session.execute("SELECT count(*) FROM flotilla.runs").fetchone() == (0,)

    eventually(none_is_left, within=MAX_WAIT)


def all_connections_come_back(instance: InstanceProcess) -> bool:
    """Whether all connections return to the pool when there is no work, except those that the engine keeps."""

    def all_are_back() -> bool:
        return "\nflotilla_pool_oldest_out_seconds 0.0\n" in instance.client.get("/metrics").text

    try:
        return eventually(all_are_back)
    except AssertionError:
        return False


def judge(
    session: psycopg.Connection[Any],
    phases: list[Phase],
    acknowledged: dict[int, bool],
    settings: dict[str, str],
    connections_out: bool,
    same_processes: bool,
) -> Verdict:
    rows = session.execute(ROWS).fetchall()
    times = [at for _, _, at in rows]
    for phase in phases:
        phase.rate = rate_of(phase, times)
        phase.back = list(back_after(phase, times))
    written = Counter(run_id for run_id, _, _ in rows)
    states = dict(session.execute(ENDS, [list(acknowledged)]).fetchall())
    return Verdict(
        phases,
        len(acknowledged),
        Counter(states.get(run_id, "nowhere") for run_id in acknowledged),
        missing=sum(written[run_id] == 0 for run_id in acknowledged),
        doubled=sum(written[run_id] > 1 for run_id, commits in acknowledged.items() if commits),
        connections_out=connections_out,
        same_processes=same_processes,
        settings=settings,
    )


def rate_of(phase: Phase, times: Sequence[float]) -> float:
    """Return the rows per second, without the time of the outages."""
    away = sum(up - down for down, up in phase.outages)
    inside = sum(
        phase.began <= at < phase.ended and not any(down <= at < up for down, up in phase.outages) for at in times
    )
    return inside / (phase.ended - phase.began - away)


def back_after(phase: Phase, times: Sequence[float]) -> Iterator[float]:
    for _, up in phase.outages:
        # Rows committed while the backends were being terminated do not count.
        after = next((at for at in times if at > up), None)
        yield after - up if after is not None else float("inf")
