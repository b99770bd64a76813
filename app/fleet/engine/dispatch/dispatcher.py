"""The dispatcher: decides when this instance claims runs for its free slots, and how many.

The executor begins them. Which runs are claimed first: the rules are in `dispatch/__init__.py`.

It waits until a queue of the backlog is due, or until something wakes it: a notification, a slot that has become free,
the reconciler. It claims nothing while the instance drains, while its link does not hold, and while the scheduler has
many slots to turn into runs.

The first claim after an idle time takes few runs, so that the instances share a handful of runs. Each claim that finds
as many as it asked for asks for more the next time.

A claim may be committed although its answer is lost. Claims take turns and are counted (`claims_begun`,
`claims_ended`). So when a claim has ended, the executor knows its runs, or the claim's answer was lost; the reconciler
finds such runs and makes them pending again.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

import psycopg

from app.fleet.background import LoopErrors, LoopService, wait_for_event
from app.fleet.cluster.member import Member
from app.fleet.cluster.registry import Identity
from app.fleet.db.pool.pool import Database
from app.fleet.db.server_clock import ServerClock
from app.fleet.engine.dispatch.backlog import MANY, Backlog, DueQueue
from app.fleet.engine.dispatch.claimant import Claimant
from app.fleet.engine.execute.attempt import Attempt
from app.fleet.engine.execute.executor import Executor
from app.fleet.engine.figures.run_metrics import RunMetrics
from app.fleet.errors import DatabaseError
from app.fleet.lifecycle import Lifecycle
from app.fleet.runs.claim import TRACE_PARENT
from app.fleet.stream.relay import CHANGED, Relay
from app.fleet.telemetry import tracing
from app.fleet.telemetry.logs import event_log

# How many runs a claim asks for: first, at most, and by which factor it grows.
FIRST = 4
BATCH = 500
GROWTH = 4
# A claim looks at so many queues, and at more the more it asks for: most are empty if other instances look too.
QUEUES = 512
# How often to check whether claiming is allowed again.
TICK = 0.1
RETRY = 0.1

log = event_log(__name__)


class Dispatcher(LoopService):
    name = "dispatcher"

    def __init__(
        self,
        database: Database,
        member: Member,
        lifecycle: Lifecycle,
        relay: Relay,
        executor: Executor,
        backlog: Backlog,
        claimant: Claimant,
        clock: ServerClock,
        metrics: RunMetrics,
    ) -> None:
        super().__init__()
        self.claims_begun = self.claims_ended = 0
        self._member = member
        self._lifecycle = lifecycle
        self._relay = relay
        self._executor = executor
        self._backlog = backlog
        self._claimant = claimant
        self._clock = clock
        self._metrics = metrics
        self._tracer = tracing.tracer()
        self._connection = database.dedicated()
        self._batch_size = FIRST
        self._claiming_paused = False
        self._wake = asyncio.Event()
        self._errors = LoopErrors(
            log, service="dispatcher", defect="engine.defect", failed="dispatcher.failed", retry_interval=RETRY
        )

    def wake(self) -> None:
        self._wake.set()

    def pause_claiming(self, paused: bool) -> None:
        """Leave new runs to other instances for a moment: this one has many slots to turn into runs first."""
        self._claiming_paused = paused
        self._wake.set()

    def on_settled(self, attempts: Sequence[Attempt]) -> None:
        """Slots have become free; a limit or an ordering key may allow the next run."""
        now = asyncio.get_running_loop().time()
        limited = self._claimant.limited
        for action_id in {each.action_id for each in attempts if each.limited or each.action_id in limited}:
            self._backlog.add_action(action_id, now)
        for attempt in attempts:
            if attempt.ordering_key is not None:
                self._backlog.add_next_of(attempt.action_id, attempt.ordering_key)
        self._wake.set()

    async def _stop(self) -> None:
        await super()._stop()
        await self._connection.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(psycopg.Error, DatabaseError):
            await self._prepare()
        while True:
            self._wake.clear()
            now = loop.time()
            due = self._backlog.due(now, 2 * self._batch_size + QUEUES) if self._may_claim() else []
            if not due:
                await self._sleep_until(self._backlog.next_due(), now)
                continue
            async with self._errors.logged():
                await self._claim(due, now)

    def _may_claim(self) -> bool:
        return (
            self._executor.room > 0
            and not self._claiming_paused
            and not self._lifecycle.draining.is_set()
            and self._member.holds()
        )

    async def _sleep_until(self, due: float | None, now: float) -> None:
        """Wait until something wakes the dispatcher or a queue is due. If claiming is not allowed, check again soon."""
        if not self._may_claim():
            timeout: float | None = TICK if self._executor.room > 0 and not self._claiming_paused else None
        else:
            timeout = None if due is None else max(0.0, due - now)
        await wait_for_event(self._wake, timeout)

    async def _prepare(self) -> None:
        if (identity := self._member.identity) is not None:
            async with self._connection.connection() as connection:
                await self._claimant.prepare(connection, identity)

    async def _claim(self, due: Sequence[DueQueue], now: float) -> None:
        identity = self._member.identity
        if identity is None:
            return
        self.claims_begun += 1
        try:
            await self._claim_as(identity, due, now)
        finally:
            self.claims_ended += 1

    async def _claim_as(self, identity: Identity, due: Sequence[DueQueue], now: float) -> None:
        # When runs of many actions wait, the instances share the queues already.
        room = min(self._executor.room, max(self._batch_size, len(due) if len(due) > MANY else 0))
        began_ns = time.time_ns() if self._tracer is not None else 0
        async with self._connection.connection() as connection:
            rows = await self._claimant.claim(connection, identity, due, room, now)
        if self._member.identity != identity:
            # When that identity was declared gone, the same transaction made its runs pending.
            return
        if self._relay.has_followers:
            self._relay.notify(CHANGED, (row[0] for row in rows))
        self._batch_size = min(self._batch_size * GROWTH, BATCH) if len(rows) >= room else FIRST
        for row in rows:
            self._executor.begin(row)
        # After that, so that no error here keeps a claimed run from its beginning.
        now = asyncio.get_running_loop().time()
        self._metrics.started(rows, self._clock.instant(now) if self._clock.known else None)
        if rows and self._tracer is not None:
            with tracing.contained("receive"):
                tracing.claimed(self._tracer, began_ns, [row[TRACE_PARENT] for row in rows])
        if 0 < len(rows) < room:
            # They begin before the next claim. In a flood the next claim is sent while they run.
            await asyncio.sleep(0)
