"""What happened to runs in each minute, for each action: the table `run_minutes`, which the dashboard draws.

It has three parts:

    counts    Each instance counts in memory the attempts that began and ended (`minute_counts.py`), and adds the counts
              to the rows of their minutes, about every `INTERVAL`, if there are any. So it costs no statement per run.
    backlog   The leader writes once a minute how many runs could begin, and for how long the oldest has been due: a row
              for each action with such runs, and a row with the action 0 for all actions. The latter shows that the
              backlog was read: an action without a row in such a minute had none. If several leaders read it within a
              minute, the highest numbers stay.
    prune     The leader deletes the rows of the minutes more than `KEPT` ago (`engine/maintenance/pruner.py`).

A flush is one statement for all minutes and actions, in a transaction of its own. An attempt is in a flush **at most
once**: if it cannot be known whether a flush was committed, its counts are dropped, because counting twice would show
runs that never were. Every statement locks rows in the order of the key, so flushes cannot deadlock. None waits for a
locked row for longer than `LOCK_TIMEOUT`, and nothing waits for a flush.

    failure                                       effect
    no connection, or an error before the COMMIT  the counts are kept, and added by the next flush to the same minutes;
                                                  of more than `MAX_PAIRS`, the oldest are dropped
    the answer to the COMMIT is lost              the counts are dropped: `minutes.lost`
    another session has locked a row              as before the COMMIT
    the instance dies                             what it counted since its last flush is lost
    there is no leader, or it cannot read the     there are no figures of the backlog for that minute
      backlog within a second

The ordered shutdown flushes once more when the executor has paused. While the database is away, no end is durable, so
there is little to keep.

Not guaranteed: a count of every attempt. An attempt that ends with its instance has no outcome, and is not counted.
"""

import asyncio
from datetime import datetime, timedelta
from typing import Any

from app.fleet.background import LoopErrors, LoopService, cancel_and_wait, jittered, wait_for_event
from app.fleet.cluster.member import Member
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection, Database
from app.fleet.db.server_clock import ServerClock
from app.fleet.engine.figures.cluster_figures import LIMIT_TIME
from app.fleet.engine.figures.minute_counts import MinuteCounts, Pairs, attempts_of, minute_of
from app.fleet.engine.figures.run_metrics import OUTCOMES
from app.fleet.telemetry.logs import event_log
from app.fleet.telemetry.redaction import describe

INTERVAL = 10.0
LOCK_TIMEOUT_MS = 1000
# How long the ordered shutdown waits for the last flush.
LAST_FLUSH = 1.0
# The chart of a day begins at most a quarter of an hour more than a day ago.
KEPT = timedelta(hours=25)
# The backlog is read in the middle of a minute: schedules make runs at its start, which begin at once.
MIDDLE = timedelta(seconds=30)

log = event_log(__name__)

LIMIT_LOCKS = Statement(f"SELECT set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true)")

ADD = Statement("""
INSERT INTO {schema}.run_minutes AS m (
    minute, action_id, succeeded, failed, cancelled, retried, paused, work_seconds, begun, waited_seconds,
    longest_wait_seconds
)
SELECT *
FROM unnest(
    %(minutes)s::timestamptz[], %(actions)s::int[], %(succeeded)s::int8[], %(failed)s::int8[], %(cancelled)s::int8[],
    %(retried)s::int8[], %(paused)s::int8[], %(work)s::float8[], %(begun)s::int8[], %(waited)s::float8[],
    %(longest_wait)s::float8[]
) AS n (minute, action_id)
ORDER BY n.minute, n.action_id
ON CONFLICT (minute, action_id) DO UPDATE
SET succeeded = m.succeeded + excluded.succeeded,
    failed = m.failed + excluded.failed,
    cancelled = m.cancelled + excluded.cancelled,
    retried = m.retried + excluded.retried,
    paused = m.paused + excluded.paused,
    work_seconds = m.work_seconds + excluded.work_seconds,
    begun = m.begun + excluded.begun,
    waited_seconds = m.waited_seconds + excluded.waited_seconds,
    longest_wait_seconds = greatest(m.longest_wait_seconds, excluded.longest_wait_seconds)
""")

ADD_BACKLOG = Statement("""
WITH backlog AS MATERIALIZED (
    SELECT action_id, runs, oldest_seconds FROM {schema}.runnable_runs WHERE runs > 0
)
INSERT INTO {schema}.run_minutes AS m (minute, action_id, waiting, oldest_seconds)
SELECT date_trunc('minute', statement_timestamp()), b.*
FROM (
    SELECT 0 AS action_id, coalesce(sum(runs), 0), coalesce(max(oldest_seconds), 0) FROM backlog
    UNION ALL
    SELECT action_id, runs, oldest_seconds FROM backlog
) AS b
ORDER BY b.action_id
ON CONFLICT (minute, action_id) DO UPDATE
SET waiting = greatest(m.waiting, excluded.waiting),
    oldest_seconds = greatest(m.oldest_seconds, excluded.oldest_seconds)
""")

PRUNE = Statement("""
WITH old AS MATERIALIZED (
    SELECT ctid
    FROM {schema}.run_minutes
    WHERE minute < statement_timestamp() - %(kept)s
    ORDER BY minute, action_id
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
)
DELETE FROM {schema}.run_minutes WHERE ctid = ANY (ARRAY(SELECT ctid FROM old))
""")


class RunMinutes(LoopService):
    name = "minutes"

    def __init__(self, database: Database, member: Member, clock: ServerClock) -> None:
        super().__init__()
        self.counts = MinuteCounts(self._now)
        self._database = database
        self._member = member
        self._clock = clock
        self._ending = asyncio.Event()
        # When this instance wrote the backlog last, in minutes that begin at `MIDDLE`.
        self._backlog_at: datetime | None = None
        self._flush_errors, self._backlog_errors = (
            LoopErrors(
                log,
                service="minutes",
                defect="engine.defect",
                failed="minutes.failed",
                warn_when=lambda failures: failures == 1,
                defect_pause=0.0,
                what=what,
            )
            for what in ("counts", "backlog")
        )

    async def _run(self) -> None:
        ending = False
        while not ending:
            await wait_for_event(self._ending, jittered(INTERVAL))
            # Read before the flush: the last flush begins after the stop.
            ending = self._ending.is_set()
            async with self._flush_errors.logged():
                await self.flush()
            if not ending and self._member.leading:
                async with self._backlog_errors.logged():
                    await self._add_backlog_once_a_minute()

    async def _stop(self) -> None:
        """Let a flush that is under way end, and flush once more."""
        self._ending.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=LAST_FLUSH)
        await cancel_and_wait(self._task)

    async def flush(self) -> None:
        """Add to the table what was counted since the last flush."""
        pairs = self.counts.take()
        if not pairs:
            return
        committing = False
        try:
            async with self._database.connection() as connection:
                await connection.execute(LIMIT_LOCKS)
                await connection.execute(self._database.namespace.sql(ADD), values_of(pairs))
                committing = True
        except BaseException as error:
            lost = attempts_of(pairs.values()) if committing else self.counts.put_back(pairs)
            if lost:
                log.warning("minutes.lost", attempts=lost, reason=describe(error))
            raise

    async def add_backlog(self) -> None:
        """Write how many runs could begin now."""
        async with self._database.connection() as connection:
            await connection.execute(LIMIT_TIME)
            await connection.execute(self._database.namespace.sql(ADD_BACKLOG))

    async def _add_backlog_once_a_minute(self) -> None:
        now = self._now()
        at = None if now is None else minute_of(now + MIDDLE)
        if at != self._backlog_at:
            await self.add_backlog()
            self._backlog_at = at

    def _now(self) -> datetime | None:
        return self._clock.instant(asyncio.get_running_loop().time()) if self._clock.known else None


def values_of(pairs: Pairs) -> dict[str, list[Any]]:
    """Return the parameters of `ADD`: an array for each column."""
    counts = list(pairs.values())
    return {
        "minutes": [minute for minute, _ in pairs],
        "actions": [action_id for _, action_id in pairs],
        **{outcome: [each.ended[outcome] for each in counts] for outcome in OUTCOMES},
        "work": [each.work / 1e6 for each in counts],
        "begun": [each.begun for each in counts],
        "waited": [each.waited / 1e6 for each in counts],
        "longest_wait": [each.longest_wait / 1e6 for each in counts],
    }


async def prune_minutes(connection: Connection, namespace: Namespace, batch: int) -> int:
    """Delete up to so many rows of the minutes more than `KEPT` ago; return how many."""
    return (await connection.execute(namespace.sql(PRUNE), {"kept": KEPT, "batch": batch})).rowcount
