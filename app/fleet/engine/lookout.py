"""The lookout: one statement every two seconds that sees whatever a notification should have told, and did not.

Everything that is quick in the engine is quick because somebody was told. This is why it is also right when nobody
was. `LOOK` answers with rows of several kinds:

    kind     a row for                                  then
    place    an action and priority with pending runs   the executor looks there, from that instant on
    mine     a run that is running under our id         cancelled on request? still ours? do we know of it at all?
    lapsed   (one) runs that somebody must take back    `recovery.sweep`
    slot     the action of ours that is due next        the scheduler
    limit    an action with a limit in the cluster      claims of it are counted, whatever our code says
    now      (one) PostgreSQL's clock, and how many     when to look, and which part of many places is ours
             ready instances have the same actions

The interval is never the same twice, so that instances that started together do not look together. An instance that
leads acts on `lapsed` and `slot` at once; the others leave it a moment (`BACK_UP`), and then act all the same: the
leader's event loop may be blocked while its link lives.
"""

import asyncio
import random
from collections.abc import Callable
from datetime import datetime
from typing import Any

import psycopg

from app.fleet.cluster.member import Member
from app.fleet.db.pool import Connection, Database
from app.fleet.db.statements import array
from app.fleet.engine import recovery
from app.fleet.engine.actions import Catalogue
from app.fleet.engine.executor import Executor
from app.fleet.engine.run import Run
from app.fleet.engine.synchronise import announce
from app.fleet.errors import DatabaseError
from app.fleet.service import Service, let_go, woken
from app.fleet.stream.events import KEPT, write_down
from app.fleet.stream.feed import noted
from app.fleet.telemetry.logs import events

EVERY = 2.0
AFTER_DEFECT = 1.0
BACK_UP = 1.0
# A claim's answer is on its way for less than this.
UNKNOWN_FOR = 5.0

log = events(__name__)

LOOK = """
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
SELECT 'mine', id, token, started_at, cancel_requested_at IS NOT NULL
FROM {schema}.runs
WHERE state = 'running' AND instance_id = %(me)s
UNION ALL
SELECT 'lapsed', count(*), 0, NULL, false
FROM {schema}.runs AS r
WHERE r.state = 'running'
  AND (r.deadline_at < clock_timestamp() - make_interval(secs => %(slack)s)
       OR NOT EXISTS (SELECT FROM {schema}.instances AS i WHERE i.id = r.instance_id AND i.state <> 'gone'))
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
"""

# A claim of ours whose answer never came: nobody here runs it, so it goes back as if it had not been claimed.
PUT_BACK = f"""
WITH back AS (
    UPDATE {{schema}}.runs AS r
    SET state = 'pending', attempt = r.attempt - 1, deadline_at = NULL, events = r.events + 1
    FROM unnest(%(ids)s::int8[], %(tokens)s::int8[]) AS u (id, token)
    WHERE r.id = u.id AND r.token = u.token AND r.state = 'running'
    RETURNING {KEPT}, r.action_id, r.priority, r.attempt + 1 AS ran,
              'the answer to its claim was lost on the way' AS why
), written AS (
    {write_down("back")}
), noted AS (
    {noted("back", "'pending'")}
)
SELECT action_id, priority, run_at FROM back
"""


class Lookout(Service):
    name = "lookout"

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
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def look_now(self) -> None:
        self._wake.set()

    async def _start(self) -> None:
        self._task = asyncio.create_task(self._look_for_ever(), name="lookout")

    async def _stop(self) -> None:
        await let_go(self._task)

    async def _look_for_ever(self) -> None:
        while True:
            self._wake.clear()
            identity = self._member.identity
            if identity is not None and self._member.holds():
                try:
                    await self._look(identity.id)
                except (psycopg.Error, DatabaseError) as error:
                    log.debug("lookout.failed", reason=" ".join(str(error).split()))
                except Exception as error:  # noqa: BLE001 — a defect of ours must not end it for good
                    log.error("engine.defect", error=error, service="lookout")
                    await asyncio.sleep(AFTER_DEFECT)
            pause = EVERY * random.uniform(0.75, 1.25)
            await woken(self._wake, pause)

    async def _look(self, me: int) -> None:
        loop = asyncio.get_running_loop()
        known = dict(self._executor.running_runs)
        # The leader acts at once, the others a moment later.
        slack = recovery.SLACK + (0 if self._member.leading else BACK_UP)
        values = {"me": me, "actions": array(self._catalogue.ids), "slack": slack}
        async with self._database.autocommit() as connection:
            rows = await (await connection.execute(self._database.namespace.sql(LOOK), values)).fetchall()
            self.looks += 1
            now = loop.time()
            by_kind: dict[str, list[tuple[Any, ...]]] = {}
            for kind, *rest in rows:
                by_kind.setdefault(kind, []).append(tuple(rest))
            ((before_us, alike, server_now, announced),) = by_kind["now"]
            parts = max(1, alike)
            self._executor.claimant.ready.part = (before_us % parts, parts)
            self._executor.claimant.clock.learn(server_now, now)
            self._executor.claimant.limited = {action_id for action_id, *_ in by_kind.get("limit", [])}
            for action_id, priority, run_at, _ in by_kind.get("place", []):
                self._executor.claimant.ready.tell(action_id, priority, run_at, now)
            self._executor.wake()
            waits = [(server_now - run_at).total_seconds() for _, _, run_at, _ in by_kind.get("place", [])]
            self.oldest_wait = max([0.0, *waits])
            for _, _, next_run_at, _ in by_kind.get("slot", []):
                self._on_slot(next_run_at)
            if not announced:
                await announce(connection, self._database.namespace, me, self._catalogue.ids)
            if by_kind["lapsed"][0][0]:
                await recovery.sweep(connection, self._database.namespace, slack=slack)
            await self._compare(connection, by_kind.get("mine", []), known, server_now)

    async def _compare(
        self, connection: Connection, mine: list[tuple[Any, ...]], known: dict[int, Run[Any]], server_now: datetime
    ) -> None:
        """Hold what the database says of our runs against what we know of them."""
        rows = {run_id: (token, started_at, cancelled) for run_id, token, started_at, cancelled in mine}
        for run_id, (_, _, cancelled) in rows.items():
            if cancelled:
                self._executor.cancel(run_id)
        for run_id, run in known.items():
            # Known before we asked and still going after the answer: if it was not there, it is not ours.
            ours = run_id in rows and rows[run_id][0] == run.token
            still_here = self._executor.running_runs.get(run_id) is run
            if still_here and not ours and not run.committing:
                self._executor.superseded(run)
        lost = {
            run_id: token
            for run_id, (token, started_at, _) in rows.items()
            if (server_now - started_at).total_seconds() > UNKNOWN_FOR and not self._executor.knows(run_id, token)
        }
        if lost:
            put_back = await connection.execute(
                self._database.namespace.sql(PUT_BACK), {"ids": list(lost), "tokens": list(lost.values())}
            )
            log.warning("run.claim_lost", runs=list(lost))
            now = asyncio.get_running_loop().time()
            for action_id, priority, run_at in await put_back.fetchall():
                self._executor.claimant.ready.tell(action_id, priority, run_at, now)
            self._executor.wake()
