"""What happened to runs in the last hour or day, from the table `run_minutes`: read once for all viewers.

The statements read a day of all actions at most: with a hundred actions, 150,000 rows. So an hour is read at most once
in ten seconds, and a day at most once in a minute.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from fastapi import Request

from app.fleet.dashboard.charts.drawing import Spark, spark
from app.fleet.dashboard.frame import cluster_reads
from app.fleet.dashboard.frame.page import reading
from app.fleet.dashboard.frame.shared_reads import context_of, shared
from app.fleet.db.namespace import Statement
from app.fleet.engine.figures.run_metrics import OUTCOMES

# Stands for all actions, as in the table.
ALL = 0
# For how many seconds an answer is shown, by the name of the span.
MAX_AGE = {"hour": 10.0, "day": 60.0}
SPARK_POINTS, SPARK_MINUTES = 30, 2

# One row for each period with anything. Of the backlog it has the highest figures, and null if no leader has read it:
# the row of all actions shows that it was read, and then an action without a row had no backlog.
READ_PERIODS = Statement("""
SELECT date_bin(%(width)s, minute, %(since)s) AS at,
       sum(succeeded)::int8 AS succeeded, sum(failed)::int8 AS failed, sum(cancelled)::int8 AS cancelled,
       sum(retried)::int8 AS retried, sum(paused)::int8 AS paused, sum(work_seconds) AS work, sum(begun)::int8 AS begun,
       sum(waited_seconds) AS waited, max(longest_wait_seconds) AS longest_wait,
       coalesce(max(waiting) FILTER (WHERE action_id = %(action)s), max(0) FILTER (WHERE action_id = 0)) AS waiting,
       max(oldest_seconds) FILTER (WHERE action_id = %(action)s AND waiting > 0) AS oldest
FROM {schema}.run_minutes
WHERE minute >= %(since)s AND (%(action)s = 0 OR action_id IN (0, %(action)s))
GROUP BY at
""")

# One row for each action with attempts or begun runs. The arrays have the periods with anything, by their numbers.
READ_RECENT = Statement("""
WITH periods AS MATERIALIZED (
    SELECT action_id, date_bin(%(width)s, minute, %(since)s) AS at,
           sum(succeeded) AS succeeded, sum(failed) AS failed, sum(cancelled) AS cancelled, sum(retried) AS retried,
           sum(paused) AS paused, sum(begun) AS begun, sum(waited_seconds) AS waited,
           max(longest_wait_seconds) AS longest_wait
    FROM {schema}.run_minutes
    WHERE minute >= %(since)s AND action_id > 0
    GROUP BY action_id, at
)
SELECT a.name,
       sum(succeeded)::int8, sum(failed)::int8, sum(cancelled)::int8, sum(retried)::int8, sum(paused)::int8,
       sum(begun)::int8, sum(waited), max(longest_wait),
       array_agg((extract(epoch FROM at - %(since)s) / extract(epoch FROM %(width)s))::int),
       array_agg((succeeded + failed + cancelled + retried + paused)::int8), array_agg(failed::int8)
FROM periods AS p
JOIN {schema}.actions AS a ON a.id = p.action_id
GROUP BY a.name
HAVING sum(succeeded + failed + cancelled + retried + paused + begun) > 0
""")


class Span(NamedTuple):
    """What a chart shows: so many periods of so many minutes."""

    name: str
    periods: int
    minutes: int

    def since(self, now: datetime) -> datetime:
        """Return the start of the first period; the last one has `now` in it. Periods begin at full quarters."""
        now = now.astimezone(UTC)
        last = now.replace(minute=now.minute // self.minutes * self.minutes, second=0, microsecond=0)
        return last - timedelta(minutes=self.minutes * (self.periods - 1))


SPANS = {each.name: each for each in (Span("hour", 60, 1), Span("day", 96, 15))}
RECENT = Span("hour", SPARK_POINTS, SPARK_MINUTES)


@dataclass(frozen=True)
class Period:
    """What happened in a period. Durations are in seconds."""

    at: datetime
    # The attempts that ended, by outcome, and how long their actions ran.
    ended: dict[str, int]
    work: float = 0.0
    begun: int = 0
    # None if no run began.
    mean_wait: float | None = None
    longest_wait: float | None = None
    # How many runs could begin (None: not known), and for how long the oldest had been due (None: there was none).
    waiting: int | None = None
    oldest: float | None = None

    @property
    def attempts(self) -> int:
        return sum(self.ended.values())


@dataclass(frozen=True)
class Recent:
    """What happened to the runs of an action in the last hour."""

    ended: dict[str, int]
    mean_wait: float | None
    longest_wait: float | None
    spark: Spark


def period(at: datetime, *row: Any) -> Period:
    """Return the period of a row of `READ_PERIODS`."""
    succeeded, failed, cancelled, retried, paused, work, begun, waited, longest_wait, waiting, oldest = row
    ended = by_outcome(succeeded, failed, cancelled, retried, paused)
    return Period(at.astimezone(UTC), ended, work, begun, *waits(begun, waited, longest_wait), waiting, oldest)


def by_outcome(*counts: int) -> dict[str, int]:
    return dict(zip(map(str, OUTCOMES), counts, strict=True))


def waits(begun: int, waited: float, longest: float) -> tuple[float | None, float | None]:
    """Return the mean wait and the longest one."""
    return (waited / begun, longest) if begun else (None, None)


def parameters(span: Span, since: datetime) -> dict[str, Any]:
    return {"width": timedelta(minutes=span.minutes), "since": since}


def dense(places: Sequence[int], numbers: Sequence[int]) -> list[int]:
    """Return a number for each point of a sparkline."""
    points = [0] * SPARK_POINTS
    for place, number in zip(places, numbers, strict=True):
        if place < SPARK_POINTS:
            points[place] = number
    return points


async def history(request: Request, span: Span, action_id: int = ALL) -> list[Period]:
    """Return all periods of a span, those in which nothing happened too: of an action, or of all."""
    since = span.since(await cluster_reads.now(request))

    async def read() -> list[Period]:
        context = context_of(request)
        values = {**parameters(span, since), "action": action_id}
        async with reading(context) as connection:
            cursor = await connection.execute(context.database.namespace.sql(READ_PERIODS), values)
            found = {row[0]: period(*row) for row in await cursor.fetchall()}
        starts = [since + timedelta(minutes=span.minutes * number) for number in range(span.periods)]
        return [found.get(at) or Period(at, by_outcome(0, 0, 0, 0, 0)) for at in starts]

    return await shared(request, ("history", span.name, action_id), read, max_age=MAX_AGE[span.name])


async def recent(request: Request) -> dict[str, Recent]:
    """Return the last hour of every action, by its name."""
    since = RECENT.since(await cluster_reads.now(request))

    async def read() -> dict[str, Recent]:
        context = context_of(request)
        async with reading(context) as connection:
            statement = context.database.namespace.sql(READ_RECENT)
            rows = await (await connection.execute(statement, parameters(RECENT, since))).fetchall()
        return {
            name: Recent(
                by_outcome(*counts), *waits(begun, waited, longest), spark(dense(places, all_), dense(places, failed))
            )
            for name, *counts, begun, waited, longest, places, all_, failed in rows
        }

    return await shared(request, "recent", read, max_age=MAX_AGE[RECENT.name])
