"""The reconciler: one statement every two seconds that sees whatever a notification should have told, and did not.

Everything that is quick in the engine is quick because somebody was told. This is why it is also right when nobody
was. `LOOK` answers with rows of several kinds:

    kind     a row for                                  then
    place    an action and priority with pending runs   the executor looks there, from that instant on
    mine     a run that is running under our id         cancelled on request? still ours? do we know of it at all?
    lapsed   (one) runs of instances that are gone,     `recovery.sweep`
             and runs long beyond their deadline
    slot     the action of ours that is due next        the scheduler
    limit    an action with a limit in the cluster      claims of it are counted, whatever our code says
    ready    (one) how many instances there are         whose turn it is to look at the runs of all
    now      (one) PostgreSQL's clock, and how many     when to look, and which part of many places is ours
             ready instances have the same actions

The interval is never the same twice, so that instances that started together do not look together. An instance that
leads acts on `lapsed` and `slot` at once; the others leave it a moment (`BACK_UP`), and then act all the same: the
leader's event loop may be blocked while its link lives.

Each instance reads its own runs. The runs of all are read by the leader, and by one of the others at a time, which take
turns by PostgreSQL's clock (`TURN`). So what the cluster reads grows with what it runs, and not with the square of it.

Deadlines go on while the database is away, but nobody acts on them: the instance that executed a run may have its end,
and could not write it. An instance ends another's overdue run only when it has looked, and written what it had to,
for `recovery.SLACK` without a failure or a pause. By then the end that waited is written (`execute/writer.py`).

A run that runs under our id although no attempt here knows of it belongs to a claim that is still under way, or to one
whose answer was lost. It is put back as soon as every claim that may have taken it is over; no clock decides.
"""

import asyncio
import random
from collections.abc import Callable
from datetime import datetime
from typing import Any

import psycopg

from app.fleet.background import Service, cancel_and_wait, wait_for_event
from app.fleet.cluster.member import Member
from app.fleet.db.namespace import Statement
from app.fleet.db.pool import Connection, Database
from app.fleet.db.statements import array
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.synchronise import announce
from app.fleet.engine.execute.executor import Executor
from app.fleet.engine.execute.run import Run
from app.fleet.engine.maintenance import rescuer
from app.fleet.errors import DatabaseError
from app.fleet.runs.events import EVENT_COLUMNS, event_insert_sql
from app.fleet.runs.feed import feed_insert_sql
from app.fleet.runs.states import is_running
from app.fleet.telemetry.logs import events

EVERY = 2.0
AFTER_DEFECT = 1.0
BACK_UP = 1.0
# A reconciler that fails so often in a row says so: without it, whatever a notification did not tell is not seen at
# all.
FAILED_OFTEN = 5
# For how long it is one instance's turn: longer than any interval between two looks, so that it looks at least once.
TURN = 1.5 * EVERY
# Between two looks that follow each other without a pause. The second may have waited for a connection.
PAUSE = 3 * EVERY

log = events(__name__)

LOOK = Statement("""
WITH RECURSIVE place AS (
    (SELECT action_id, priority FROM {schema}.runs WHERE state = 'pending' ORDER BY action_id, priority LIMIT 1)
    UNION ALL
    SELECT n.action_id, n.priority
    FROM place AS p, LATERAL (
        SELECT action_id, priority
        FROM {schema}.runs
        WHERE state = 'pending' AND (action_id, priority) > (p.action_id, p.priority)
        ORDER BY action_id, priority
        LIMIT 1
    ) AS n
)
SELECT 'place' AS kind, p.action_id::int8 AS id, p.priority::int8 AS number, f.run_at AS at, false AS flag
FROM place AS p, LATERAL (
    SELECT run_at
    FROM {schema}.runs
    WHERE state = 'pending' AND action_id = p.action_id AND priority = p.priority
    ORDER BY run_at
    LIMIT 1
) AS f
UNION ALL
SELECT 'mine', id, token, NULL, cancel_requested_at IS NOT NULL
FROM {schema}.runs
WHERE state = 'running' AND action_id = ANY (%(actions)s::int[]) AND instance_id = %(me)s
UNION ALL
SELECT 'lapsed', count(*) FILTER (WHERE i.id IS NULL),
       count(*) FILTER (WHERE r.deadline_at < clock_timestamp() - make_interval(secs => %(slack)s)), NULL, false
FROM {schema}.runs AS r
LEFT JOIN {schema}.instances AS i ON i.id = r.instance_id AND i.state <> 'gone'
WHERE %(everyone)s AND r.state = 'running'
UNION ALL
SELECT 'ready', count(*) FILTER (WHERE id < %(me)s), count(*), NULL, false
FROM {schema}.instances
WHERE state = 'ready'
UNION ALL
SELECT 'slot', a.id, 0, a.next_run_at, false
FROM (
    SELECT id, next_run_at
    FROM {schema}.actions
    WHERE id = ANY (%(actions)s::int[]) AND paused_at IS NULL AND next_run_at IS NOT NULL
    ORDER BY next_run_at
    LIMIT 1
) AS a
UNION ALL
SELECT 'limit', id, 0, NULL, false
FROM {schema}.actions
WHERE id = ANY (%(actions)s::int[]) AND (concurrency IS NOT NULL OR rate_interval IS NOT NULL)
UNION ALL
SELECT 'now', count(*) FILTER (WHERE i.id < %(me)s), count(*), clock_timestamp(),
       EXISTS (SELECT FROM {schema}.standby WHERE instance_id = %(me)s)
FROM {schema}.standby AS s
JOIN {schema}.instances AS i ON i.id = s.instance_id AND i.state = 'ready'
WHERE s.action_ids = (SELECT action_ids FROM {schema}.standby WHERE instance_id = %(me)s)
""")

# A claim of ours whose answer never came: nobody here runs it, so it goes back as if it had not been claimed.
PUT_BACK = Statement(f"""
WITH back AS (
    UPDATE {{schema}}.runs AS r
    SET state = 'pending', attempt = r.attempt - 1, deadline_at = NULL, events = r.events + 1
    FROM unnest(%(ids)s::int8[], %(tokens)s::int8[]) AS u (id, token)
    WHERE r.id = u.id AND r.token = u.token AND {is_running()}
    RETURNING {EVENT_COLUMNS}, r.action_id, r.priority, r.attempt + 1 AS ran,
              'the answer to its claim was lost on the way' AS why
), written AS (
    {event_insert_sql("back")}
), noted AS (
    {feed_insert_sql("back", "'pending'")}
)
SELECT action_id, priority, run_at, id FROM back
""")


class Reconciler(Service):
    name = "reconciler"

    def __init__(
        self,
        database: Database,
        member: Member,
        catalogue: Catalogue,
        executor: Executor,
        on_slot: Callable[[datetime], None],
    ) -> None:
        """`on_slot` is told when the next slot of our actions is due."""
        super().__init__()
        self.looks = 0
        # Of the run that has been due for longest, of any action, in seconds.
        self.oldest_wait = 0.0
        self._database = database
        self._member = member
        self._catalogue = catalogue
        self._executor = executor
        self._on_slot = on_slot
        # How many of the ready instances come before this one, and how many there are.
        self._place = (0, 1)
        # Since when looks have followed each other without a failure or a pause, and the last of them.
        self._sound_since: float | None = None
        self._looked_at = 0.0
        # Looks that have failed since the last one that did not.
        self._failed = 0
        # Runs under our id that nobody here knows, with the number of the latest claim that may have taken them.
        self._unknown: dict[tuple[int, int], int] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def look_now(self) -> None:
        self._wake.set()

    async def _start(self) -> None:
        self._task = asyncio.create_task(self._look_for_ever(), name="reconciler")

    async def _stop(self) -> None:
        await cancel_and_wait(self._task)

    async def _look_for_ever(self) -> None:
        while True:
            self._wake.clear()
            identity = self._member.identity
            if identity is not None and self._member.holds():
                try:
                    await self._look(identity.id)
                    self._failed = 0
                except (psycopg.Error, DatabaseError) as error:
                    self._sound_since = None
                    self._failed += 1
                    reason = " ".join(str(error).split())
                    if self._failed % FAILED_OFTEN == 0:
                        log.warning("reconciler.failed", reason=reason)
                    else:
                        log.debug("reconciler.failed", reason=reason)
                except Exception as error:  # noqa: BLE001 — a defect of ours must not end it for good
                    log.error("engine.defect", error=error, service="reconciler")
                    await asyncio.sleep(AFTER_DEFECT)
            pause = EVERY * random.uniform(0.75, 1.25)
            await wait_for_event(self._wake, pause)

    async def _look(self, me: int) -> None:
        loop = asyncio.get_running_loop()
        known = dict(self._executor.running_runs)
        # The leader acts at once, the others a moment later.
        slack = rescuer.SLACK + (0 if self._member.leading else BACK_UP)
        values = {"me": me, "actions": array(self._catalogue.ids), "slack": slack, "everyone": self._looks_at_all()}
        async with self._database.autocommit() as connection:
            rows = await (await connection.execute(self._database.namespace.sql(LOOK), values)).fetchall()
            self.looks += 1
            now = loop.time()
            if self._sound_since is None or now - self._looked_at > PAUSE:
                self._sound_since = now
            self._looked_at = now
            by_kind: dict[str, list[tuple[Any, ...]]] = {}
            for kind, *rest in rows:
                by_kind.setdefault(kind, []).append(tuple(rest))
            ((before_us, alike, server_now, announced),) = by_kind["now"]
            parts = max(1, alike)
            self._executor.claimant.backlog.part = (before_us % parts, parts)
            self._executor.claimant.clock.learn(server_now, now)
            self._executor.claimant.limited = {action_id for action_id, *_ in by_kind.get("limit", [])}
            for action_id, priority, run_at, _ in by_kind.get("place", []):
                self._executor.claimant.backlog.tell(action_id, priority, run_at, now)
            self._executor.wake()
            waits = [(server_now - run_at).total_seconds() for _, _, run_at, _ in by_kind.get("place", [])]
            self.oldest_wait = max([0.0, *waits])
            for _, _, next_run_at, _ in by_kind.get("slot", []):
                self._on_slot(next_run_at)
            if not announced:
                await announce(connection, self._database.namespace, me, self._catalogue.ids)
            ((before_us, ready, *_),) = by_kind["ready"]
            self._place = (before_us, max(1, ready))
            await self._compare(connection, by_kind.get("mine", []), known)
            ((orphaned, overdue, *_),) = by_kind["lapsed"]
            overdue = overdue and now - self._sound_since >= rescuer.SLACK
            if orphaned or overdue:
                await rescuer.sweep(connection, self._database.namespace, slack=slack, overdue=bool(overdue))

    def _looks_at_all(self) -> bool:
        """Whether this look is at the runs of all instances: the leader's is; the others take turns."""
        place, many = self._place
        now = self._executor.claimant.clock.instant(asyncio.get_running_loop().time())
        return self._member.leading or int(now.timestamp() / TURN) % many == place

    async def _compare(self, connection: Connection, mine: list[tuple[Any, ...]], known: dict[int, Run[Any]]) -> None:
        """Hold what the database says of our runs against what we know of them."""
        rows = {run_id: (token, cancelled) for run_id, token, _, cancelled in mine}
        for run_id, (_, cancelled) in rows.items():
            if cancelled:
                self._executor.cancel(run_id)
        for run_id, run in known.items():
            # Known before we asked and still going after the answer: if it was not there, it is not ours.
            ours = run_id in rows and rows[run_id][0] == run.token
            still_here = self._executor.running_runs.get(run_id) is run
            if still_here and not ours and not run.committing:
                self._executor.superseded(run)
        begun, ended = self._executor.claims_begun, self._executor.claims_ended
        self._unknown = {
            (run_id, token): self._unknown.get((run_id, token), begun)
            for run_id, (token, _) in rows.items()
            if not self._executor.knows(run_id, token)
        }
        lost = [run for run, claim in self._unknown.items() if claim <= ended]
        if lost:
            values = {"ids": [run_id for run_id, _ in lost], "tokens": [token for _, token in lost]}
            put_back = await (await connection.execute(self._database.namespace.sql(PUT_BACK), values)).fetchall()
            now = asyncio.get_running_loop().time()
            for action_id, priority, run_at, _ in put_back:
                self._executor.claimant.backlog.tell(action_id, priority, run_at, now)
            self._executor.wake()
            if put_back:
                # The others had ended, or had been given back, between the look and now.
                log.warning("run.claim_lost", runs=[row[-1] for row in put_back])
