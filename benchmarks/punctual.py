"""A thousand actions that are due in the same second, on three instances: how late each begins, and how often.

Lateness is the time from the slot to the first statement of the action, on the system's clock, which PostgreSQL also
uses. The time of the claim (`started_at` minus `scheduled_for`, from the rows) is shown beside it. Each action and slot
must have one run and one start. The figure is the median of the p99 of five slots; all five are shown. Each instance
may execute 500 runs at the same time, so that there is room for a thousand: with the default of 100, most runs would
wait for others to end.
"""

import time
from collections import Counter
from statistics import median

from benchmarks.conditions import started_instances
from benchmarks.marks import Mark, Marks
from benchmarks.report import distribution, percentile, verdict
from tests.support.postgres import Postgres, eventually

INSTANCES = 3
COUNT = 1000
CONCURRENCY = "500"
SLOTS = 5
SECONDS = 10
P99 = 50

RUNS = """
SELECT a.name, extract(epoch FROM r.scheduled_for)::float8, extract(epoch FROM r.started_at - r.scheduled_for)::float8
FROM flotilla.finished_runs AS r JOIN flotilla.actions AS a ON a.id = r.action_id
"""


def run(*, short: bool) -> None:
    slots, seconds = (1, 2) if short else (SLOTS, SECONDS)
    with Marks() as marks:
        timetable = {"BENCHMARK_COUNT": str(COUNT), "BENCHMARK_PERIOD": str(seconds)}
        env = {
            **marks.env,
            **timetable,
            "FLOTILLA_ACTIONS": "benchmarks.timetable",
            "FLOTILLA_CONCURRENCY": CONCURRENCY,
        }
        with started_instances(INSTANCES, **env) as (postgres, _, _):
            # The first slot after all three instances are ready and had a second to settle.
            first = (time.time() + 1) // seconds * seconds + seconds
            due = [first + seconds * number for number in range(slots)]
            time.sleep(due[-1] - time.time() + min(2, seconds / 2))
            rows = eventually(lambda: finished(postgres, due))
        starts = [mark for mark in marks.all() if mark.slot in due]
    for slot in due:
        print(distribution(f"slot {due.index(slot) + 1}: the action began", lateness(starts, slot)))
    late = [mark.wall - mark.slot for mark in starts if mark.slot is not None]
    print(distribution(f"all {slots} slots: the action began", late))
    print(distribution(f"all {slots} slots: it was claimed", [late for _, _, late in rows]))
    p99 = median(percentile(lateness(starts, slot), 0.99) for slot in due) * 1000
    print(f"median of the slots' p99: {p99:.1f} ms   ≤ {P99} ms: {verdict(p99 <= P99)}")
    once = Counter(Counter((name, slot) for name, slot, _ in rows).values()) == {1: COUNT * slots}
    begun = len(starts) == len({mark.run for mark in starts}) == COUNT * slots
    pids = {mark.pid for mark in starts}
    print(f"{len(rows)} runs of {COUNT} actions on {len(pids)} instances; each exactly once: {verdict(once and begun)}")


def finished(postgres: Postgres, slots: list[float]) -> list[tuple[str, float, float]] | None:
    """Return the runs of these slots once all of them have finished."""
    with postgres.session() as session:
        rows = [row for row in session.execute(RUNS).fetchall() if row[1] in slots]
    return rows if len(rows) >= COUNT * len(slots) else None


def lateness(starts: list[Mark], slot: float) -> list[float]:
    return [mark.wall - slot for mark in starts if mark.slot == slot]
