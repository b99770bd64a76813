"""The reconciler: one statement every two seconds that finds what lost notifications have missed.

Notifications make the engine quick, and any of them may be lost. The rows of `READ_ALL` make it right:

    kind     a row for                                        then
    queue    a queue in which runs are pending                the backlog gets the queue
    mine     a run that is running with our id                is its cancellation requested? is it still ours? does the
                                                              executor have it at all?
    lapsed   (one) the number of running runs whose           `rescuer.sweep`
             instance is gone, or whose deadline is long over
    slot     the next due action of ours                      the scheduler
    limit    an action with a limit                           its claims are counted, whatever our code declares
    ready    (one) the number of instances, and whether       which instance reads the runs of all; who claims the runs
             one of another release executes runs             that an instance returns when it leaves (`engine.py`)
    now      (one) PostgreSQL's time, and how many ready      when to look for work; which part of many queues is ours
             instances execute the same actions

The interval varies at random, so that instances that started together do not read together. The leader acts on `lapsed`
and `slot` at once. The others wait for `BACK_UP` and then act too: the leader's event loop may be blocked while its
link is alive.

Each instance reads its own running runs. The leader reads the running runs of all instances; so does one other instance
at a time, in turns by PostgreSQL's clock (`TURN`). So the total number of rows read is proportional to the number of
running runs.

Deadlines pass while the database is unreachable. But the instance that ran an overdue run may have its end, and could
not write it. So an instance ends another instance's overdue run only after it has read and written without a failure or
a pause for `rescuer.SLACK`; by then the other instance has written the end (`execute/writer.py`).

A run that is running with our id, and that the executor does not have, belongs to a claim in progress, or to a claim
whose answer was lost. It becomes pending again when every claim that may have taken it has ended; no clock decides.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any

from app.fleet.background import LoopErrors, LoopService, jittered, wait_for_event
from app.fleet.cluster.member import Member
from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Connection, Database
from app.fleet.db.pool.statements import array
from app.fleet.db.server_clock import ServerClock
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.synchronise import announce
from app.fleet.engine.dispatch.backlog import Backlog
from app.fleet.engine.dispatch.claimant import Claimant
from app.fleet.engine.dispatch.dispatcher import Dispatcher
from app.fleet.engine.execute.attempt import Attempt
from app.fleet.engine.execute.executor import Executor
from app.fleet.engine.maintenance import rescuer
from app.fleet.runs.effects.notifications import QUEUE_PRIORITY
from app.fleet.runs.read.queues import QUEUES
from app.fleet.runs.requeue import UNDO_CLAIM
from app.fleet.telemetry.logs import event_log

INTERVAL = 2.0
BACK_UP = 1.0
# So many failures in a row are logged as a warning: without the reconciler, nothing finds what a notification missed.
MANY_FAILURES = 5
# How long an instance reads the runs of all: longer than any interval, so that it reads at least once.
TURN = 1.5 * INTERVAL
# Longer than that between two reads is a pause. The second read may have waited for a connection.
PAUSE = 3 * INTERVAL

log = event_log(__name__)

READ_ALL = Statement(f"""
WITH RECURSIVE {QUEUES}
SELECT 'queue' AS kind, action_id::int8 AS id, {QUEUE_PRIORITY}::int8 AS number, run_at AS at, false AS flag
FROM queues
UNION ALL
SELECT 'mine', id, token, NULL, cancel_requested_at IS NOT NULL
FROM {{schema}}.runs
WHERE state = 'running' AND action_id = ANY (%(actions)s::int[]) AND instance_id = %(me)s
UNION ALL
SELECT 'lapsed', count(*) FILTER (WHERE i.id IS NULL),
       count(*) FILTER (WHERE r.deadline_at < clock_timestamp() - make_interval(secs => %(slack)s)), NULL, false
FROM {{schema}}.runs AS r
LEFT JOIN {{schema}}.instances AS i ON i.id = r.instance_id AND i.state <> 'gone'
WHERE %(all_instances)s AND r.state = 'running'
UNION ALL
SELECT 'ready', count(*) FILTER (WHERE id < %(me)s), count(*), NULL,
       coalesce(bool_or(role <> 'web' AND version <> (SELECT version FROM {{schema}}.instances WHERE id = %(me)s)),
                false)
FROM {{schema}}.instances
WHERE state = 'ready'
UNION ALL
SELECT 'slot', a.id, 0, a.next_run_at, false
FROM (
    SELECT id, next_run_at
    FROM {{schema}}.actions
    WHERE id = ANY (%(actions)s::int[]) AND paused_at IS NULL AND next_run_at IS NOT NULL
    ORDER BY next_run_at
    LIMIT 1
) AS a
UNION ALL
SELECT 'limit', id, 0, NULL, false
FROM {{schema}}.actions
WHERE id = ANY (%(actions)s::int[]) AND (concurrency IS NOT NULL OR rate_interval IS NOT NULL)
UNION ALL
SELECT 'now', count(*) FILTER (WHERE i.id < %(me)s), count(*), clock_timestamp(),
       EXISTS (SELECT FROM {{schema}}.standby WHERE instance_id = %(me)s)
FROM {{schema}}.standby AS s
JOIN {{schema}}.instances AS i ON i.id = s.instance_id AND i.state = 'ready' AND i.role <> 'web'
WHERE s.action_ids = (SELECT action_ids FROM {{schema}}.standby WHERE instance_id = %(me)s)
""")


class Reconciler(LoopService):
    name = "reconciler"

    def __init__(
        self,
        database: Database,
        member: Member,
        catalogue: Catalogue,
        executor: Executor,
        dispatcher: Dispatcher,
        claimant: Claimant,
        backlog: Backlog,
        clock: ServerClock,
        on_slot: Callable[[datetime], None],
    ) -> None:
        """`on_slot` gets the time at which the next slot of our actions is due."""
        super().__init__()
        self.reads = 0
        # Whether a ready instance of another release executes runs, as of the last read.
        self.another_release = False
        self._database = database
        self._member = member
        self._catalogue = catalogue
        self._executor = executor
        self._dispatcher = dispatcher
        self._claimant = claimant
        self._backlog = backlog
        self._clock = clock
        self._on_slot = on_slot
        # How many of the ready instances come before this one, and how many there are.
        self._position = (0, 1)
        # Since when reads have followed each other without a failure or a pause, and when the last one was.
        self._sound_since: float | None = None
        self._read_at = 0.0
        # Runs with our id that the executor does not have, and the number of the latest claim that may have taken each.
        self._unknown: dict[tuple[int, int], int] = {}
        self._wake = asyncio.Event()
        self._errors = LoopErrors(
            log,
            service="reconciler",
            defect="engine.defect",
            failed="reconciler.failed",
            warn_when=lambda failures: failures % MANY_FAILURES == 0,
        )

    def read_now(self) -> None:
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            identity = self._member.identity
            if identity is not None and self._member.holds():
                async with self._errors.logged():
                    try:
                        await self._reconcile(identity.id)
                    except Exception:
                        self._sound_since = None
                        raise
            await wait_for_event(self._wake, jittered(INTERVAL))

    async def _reconcile(self, me: int) -> None:
        known = dict(self._executor.attempts)
        # The leader acts at once, the others a moment later.
        slack = rescuer.SLACK + (0 if self._member.leading else BACK_UP)
        values = {"me": me, "actions": array(self._catalogue.ids), "slack": slack, "all_instances": self._reads_all()}
        async with self._database.autocommit() as connection:
            rows = await (await connection.execute(self._database.namespace.sql(READ_ALL), values)).fetchall()
            now = asyncio.get_running_loop().time()
            self._note_read(now)
            by_kind: dict[str, list[tuple[Any, ...]]] = {}
            for kind, *rest in rows:
                by_kind.setdefault(kind, []).append(tuple(rest))
            ((before_us, alike, server_now, announced),) = by_kind["now"]
            self._backlog.part = (before_us % max(1, alike), max(1, alike))
            self._clock.learn(server_now, now)
            self._claimant.limited = {action_id for action_id, *_ in by_kind.get("limit", [])}
            self._add_queues(by_kind.get("queue", []), now)
            for _, _, next_run_at, _ in by_kind.get("slot", []):
                self._on_slot(next_run_at)
            if not announced:
                await announce(connection, self._database.namespace, me, self._catalogue.ids)
            ((before_us, ready, _, self.another_release),) = by_kind["ready"]
            self._position = (before_us, max(1, ready))
            await self._compare(connection, by_kind.get("mine", []), known)
            ((orphaned, overdue, *_),) = by_kind["lapsed"]
            assert self._sound_since is not None
            overdue = overdue and now - self._sound_since >= rescuer.SLACK
            if orphaned or overdue:
                await rescuer.sweep(connection, self._database.namespace, slack=slack, overdue=bool(overdue))

    def _note_read(self, now: float) -> None:
        self.reads += 1
        if self._sound_since is None or now - self._read_at > PAUSE:
            self._sound_since = now
        self._read_at = now

    def _add_queues(self, queues: list[tuple[Any, ...]], now: float) -> None:
        for action_id, priority, run_at, _ in queues:
            self._backlog.add(action_id, priority, run_at, now)
        self._dispatcher.wake()

    def _reads_all(self) -> bool:
        """Return whether this read includes the runs of all instances: the leader's do, the others take turns."""
        position, many = self._position
        now = self._clock.instant(asyncio.get_running_loop().time())
        return self._member.leading or int(now.timestamp() / TURN) % many == position

    async def _compare(self, connection: Connection, mine: list[tuple[Any, ...]], known: dict[int, Attempt]) -> None:
        """Compare the runs that the database has with our id with the attempts that the executor has."""
        rows = {run_id: (token, cancelled) for run_id, token, _, cancelled in mine}
        for run_id, (_, cancelled) in rows.items():
            if cancelled:
                self._executor.cancel(run_id)
        for run_id, attempt in known.items():
            # It ran before the statement and still runs after it: if the answer does not have it, it is not ours.
            ours = run_id in rows and rows[run_id][0] == attempt.token
            still_runs = self._executor.attempts.get(run_id) is attempt
            if still_runs and not ours and not attempt.committing:
                self._executor.stop_fenced(attempt)
        begun, ended = self._dispatcher.claims_begun, self._dispatcher.claims_ended
        self._unknown = {
            (run_id, token): self._unknown.get((run_id, token), begun)
            for run_id, (token, _) in rows.items()
            if not self._executor.owns(run_id, token)
        }
        lost = [run for run, claim in self._unknown.items() if claim <= ended]
        if lost:
            await self._put_back(connection, lost)

    async def _put_back(self, connection: Connection, lost: list[tuple[int, int]]) -> None:
        values = {"ids": [run_id for run_id, _ in lost], "tokens": [token for _, token in lost]}
        rows = await (await connection.execute(self._database.namespace.sql(UNDO_CLAIM), values)).fetchall()
        now = asyncio.get_running_loop().time()
        for action_id, priority, run_at, _ in rows:
            self._backlog.add(action_id, priority, run_at, now)
        self._dispatcher.wake()
        if rows:
            # Runs that are not in the answer have ended or become pending since the read.
            log.warning("run.claim_lost", runs=[row[-1] for row in rows])
