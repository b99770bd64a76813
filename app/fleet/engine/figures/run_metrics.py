"""What this instance counts about the runs that it executes, for each action: `GET /metrics` shows it.

The dispatcher reports the runs of each claim, and the run writer the attempts of each batch that is durable. Both
report many at once, because this is on the path of every run (`telemetry/timings.py`).

    flotilla_runs_started_total         each claimed run
    flotilla_run_wait_seconds           from the time at which a run was due until its first attempt was claimed
    flotilla_run_lateness_seconds       the same from its slot on, for scheduled runs
    flotilla_runs_ended_total           each attempt whose end is durable, by outcome
    flotilla_run_duration_seconds       how long the action ran in each of these attempts

A later attempt is not counted as a wait: its run has waited for a retry, or another instance has executed it meanwhile.

The same figures go to `run_minutes.py`, for the charts of the whole cluster.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from operator import attrgetter, itemgetter
from typing import Protocol, TypeVar

from opentelemetry.trace import Span
from prometheus_client.core import CounterMetricFamily, Metric

from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.figures.minute_counts import MinuteCounts
from app.fleet.runs.claim import ACTION, EVENTS, RUN_AT, SCHEDULED_FOR, Row
from app.fleet.runs.effects.states import RunState
from app.fleet.telemetry import tracing
from app.fleet.telemetry.metrics import MAX_NAMES, OTHERS
from app.fleet.telemetry.timings import TimingsByName

# How an attempt can end.
OUTCOMES = (RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED, "retried", "paused")
# The events of a run at its first attempt: it was created, and it is running.
FIRST_ATTEMPT = 2
MICROSECOND = timedelta(microseconds=1)

action_of_row, action_of_attempt = itemgetter(ACTION), attrgetter("action_id")

Item = TypeVar("Item")


class EndedAttempt(Protocol):
    """An attempt, as far as it is counted."""

    action_id: int
    # When the action began (0: it did not), how long it ran, and when it ended, in nanoseconds since 1970.
    began: float
    seconds: float
    ended_ns: int
    span: Span | None


class RunMetrics:
    def __init__(self, catalogue: Catalogue, minutes: MinuteCounts) -> None:
        self.outcomes: Counter[str] = Counter()
        self._catalogue = catalogue
        self._minutes = minutes
        self._tracer = tracing.tracer()
        # The names that have series of their own, and how many attempts of each began and ended.
        self._names: dict[int, str] = {}
        self._started: Counter[str] = Counter()
        self._ended: Counter[tuple[str, str]] = Counter()
        self._waits = TimingsByName("flotilla_run_wait_seconds", "From when a run was due until it began", "action")
        self._latenesses = TimingsByName(
            "flotilla_run_lateness_seconds", "From the slot of a scheduled run until it began", "action"
        )
        self._durations = TimingsByName("flotilla_run_duration_seconds", "How long an attempt took", "action")

    def started(self, rows: Sequence[Row], at: datetime | None) -> None:
        """Count claimed runs; `at` is PostgreSQL's time at the claim, if this instance knows it."""
        for action_id, own in grouped(rows, action_of_row):
            name = self._name(action_id)
            self._started[name] += len(own)
            first = [row for row in own if row[EVENTS] == FIRST_ATTEMPT]
            if not first or at is None:
                continue
            due = [row[RUN_AT] for row in first]
            if due.count(due[0]) == len(due):
                # Runs that were triggered together are due at the same instant: one subtraction for all.
                waits = [(at - due[0]) // MICROSECOND] * len(due)
            else:
                waits = [(at - run_at) // MICROSECOND for run_at in due]
            self._waits.of(name).add(waits)
            self._minutes.begun(action_id, waits)
            slots = [slot for row in first if (slot := row[SCHEDULED_FOR]) is not None]
            if slots:
                self._latenesses.of(name).add([(at - slot) // MICROSECOND for slot in slots])

    def ended(self, attempts: Sequence[EndedAttempt], outcome: str) -> None:
        """Count attempts whose end is durable; with a tracer, make the spans of that."""
        if self._tracer is not None:
            for attempt in attempts:
                if attempt.span is not None:
                    name = self._name(attempt.action_id)
                    with tracing.contained("settle"):
                        tracing.settled(self._tracer, attempt.span, name, attempt.ended_ns, outcome)
        self.outcomes[outcome] += len(attempts)
        for action_id, own in grouped(attempts, action_of_attempt):
            name = self._name(action_id)
            self._ended[name, outcome] += len(own)
            durations = [int(attempt.seconds * 1e6) for attempt in own if attempt.began]
            self._durations.of(name).add(durations)
            self._minutes.ended(action_id, outcome, len(own), sum(durations))

    def collect(self) -> Iterator[Metric]:
        # An action has all its counters from the first scrape on: an increase from nothing to 1 is no increase.
        for action_id in self._catalogue.ids:
            self._name(action_id)
        names = sorted(set(self._names.values()))
        started = CounterMetricFamily(
            "flotilla_runs_started_total", "Attempts that this instance began", labels=["action"]
        )
        for name in names:
            started.add_metric([name], self._started[name])
        yield started
        ended = CounterMetricFamily(
            "flotilla_runs_ended_total",
            "Attempts of this instance that ended and are committed",
            labels=["action", "outcome"],
        )
        for name in names:
            for outcome in OUTCOMES:
                ended.add_metric([name, outcome], self._ended[name, outcome])
        yield ended
        for histogram in (self._waits, self._latenesses, self._durations):
            yield from histogram.collect()

    def _name(self, action_id: int) -> str:
        name = self._names.get(action_id)
        if name is None:
            action = self._catalogue.of_id(action_id)
            name = OTHERS if action is None or len(self._names) >= MAX_NAMES else action.name
            self._names[action_id] = name
        return name


def grouped(items: Sequence[Item], key: Callable[[Item], int]) -> Iterator[tuple[int, Sequence[Item]]]:
    """Group by action. Most claims and batches have one action only, and are not copied."""
    if not items:
        return
    keys = set(map(key, items))
    if len(keys) == 1:
        yield keys.pop(), items
        return
    groups: dict[int, list[Item]] = {each: [] for each in keys}
    for item in items:
        groups[key(item)].append(item)
    yield from groups.items()
