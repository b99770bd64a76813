"""Time in tests: PostgreSQL's clock stays as it is, and everything that waits moves towards it.

`advance` moves the rows that wait for a time by a duration into the past: pending runs (delays of retries, `run_at`),
rates of actions, limits, and breakers. What was due in five minutes is due after `advance("5m")`. The worker writes
the delay of a retry without its random part; the `jitter` of a schedule stays random.

Schedules stand still, unless the test names their actions: otherwise a week would have ten thousand slots of actions
that the test is not about. Time goes from slot to slot of the named actions, so each slot gets its run at its turn, as
in a running cluster, and not as a slot that an outage has missed. The real scheduler inserts the runs. A slot is an
instant of PostgreSQL's clock: `scheduled_for` is about the time at which the test runs, also for `cron`.

Not moved: rows of your own tables, the retention of finished runs and of keys of `once`, leases of locks, and the
deadline of an attempt that is being executed.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from app.fleet.cluster.member import Member
from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Connection, Database
from app.fleet.db.pool.statements import array
from app.fleet.db.server_clock import ServerClock
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.dispatch.scheduler import Scheduler
from app.fleet.errors import EngineError
from app.fleet.lifecycle import Lifecycle

# More slots than that within one `advance` are a mistake in the test.
MAX_SLOTS = 1000

MOVE = Statement("""
WITH waiting AS (
    UPDATE {schema}.runs SET run_at = run_at - %(by)s WHERE state = 'pending'
), scheduled AS (
    UPDATE {schema}.actions
    SET next_run_at = CASE WHEN id = ANY (%(actions)s) THEN next_run_at - %(by)s ELSE next_run_at END,
        rate_used_until = rate_used_until - %(by)s
), limited AS (
    UPDATE {schema}.limits SET used_until = used_until - %(by)s
)
UPDATE {schema}.breakers
SET open_until = open_until - %(by)s, probe_until = probe_until - %(by)s,
    failed_at = ARRAY(SELECT at - %(by)s FROM unnest(failed_at) AS at)
""")

# The slot that is due first, and in which time.
NEXT_SLOT = Statement("""
SELECT name, next_run_at, next_run_at - clock_timestamp()
FROM {schema}.actions
WHERE id = ANY (%(actions)s) AND paused_at IS NULL AND next_run_at IS NOT NULL
ORDER BY next_run_at, id
LIMIT 1
""")

SET_SLOT = Statement("UPDATE {schema}.actions SET next_run_at = %(slot)s WHERE id = %(action)s")
SLOT_IS_NOW = Statement("UPDATE {schema}.actions SET next_run_at = clock_timestamp() WHERE id = %(action)s")

# The time until the first run is due that waits for a later time.
NEXT_RUN = Statement("""
SELECT min(run_at) - clock_timestamp() FROM {schema}.runs WHERE state = 'pending' AND run_at > clock_timestamp()
""")

# The rate of an action does not delay a run that a test executes by its id.
FREE_RATE = Statement("""
UPDATE {schema}.actions SET rate_used_until = clock_timestamp()
WHERE name = %(action)s AND rate_used_until > clock_timestamp()
""")


class TestClock:
    """Moves the time of one instance's namespace."""

    __test__ = False

    def __init__(self, database: Database, member: Member, catalogue: Catalogue) -> None:
        self._database = database
        self._sql = database.namespace.sql
        self._member = member
        self._catalogue = catalogue
        # How far the next slot of each action was moved in all.
        self._moved: dict[int, timedelta] = {}

    async def make_due(self, action: Action[Any]) -> None:
        """Insert the run of a slot that is due now."""
        async with self._database.autocommit() as connection:
            values = {"action": self._catalogue.id_of(scheduled(action).name)}
            await connection.execute(self._sql(SLOT_IS_NOW), values)
        await self._insert_slot(action)

    async def advance(self, by: timedelta, actions: Sequence[Action[Any]]) -> timedelta:
        """Let time pass up to the next slot of these actions, but at most so long, and insert its run; return the rest.

        Schedules of other actions stand still.
        """
        ids = [self._catalogue.id_of(scheduled(each).name) for each in actions]
        async with self._database.autocommit() as connection:
            row = await (await connection.execute(self._sql(NEXT_SLOT), {"actions": ids})).fetchone()
            if row is None or row[2] > by:
                await self._move(connection, by, ids)
                return timedelta()
            name, slot, left = row
            step: timedelta = max(left, timedelta())
            await self._move(connection, step, ids)
            action = self._catalogue[name]
            await self._insert_slot(action)
            assert action.schedule is not None
            # The scheduler has computed the next slot at PostgreSQL's time, which has not moved.
            action_id = self._catalogue.id_of(name)
            moved = self._moved[action_id]
            values = {"action": action_id, "slot": action.schedule.after(slot - step + moved) - moved}
            await connection.execute(self._sql(SET_SLOT), values)
        return by - step

    async def until_next_run(self) -> timedelta | None:
        """Return the time until a pending run becomes due; None if no run waits for a later time."""
        async with self._database.autocommit() as connection:
            row = await (await connection.execute(self._sql(NEXT_RUN))).fetchone()
        assert row is not None
        left: timedelta | None = row[0]
        return left

    async def free_rate(self, action: str) -> None:
        async with self._database.autocommit() as connection:
            await connection.execute(self._sql(FREE_RATE), {"action": action})

    async def _move(self, connection: Connection, by: timedelta, actions: Sequence[int]) -> None:
        for action_id in actions:
            self._moved[action_id] = self._moved.get(action_id, timedelta()) + by
        await connection.execute(self._sql(MOVE), {"by": by, "actions": array(actions)})

    async def _insert_slot(self, action: Action[Any]) -> None:
        """Have the scheduler look at this action alone."""
        alone = Catalogue({action.name: action})
        alone.set_ids({action.name: self._catalogue.id_of(action.name)})
        scheduler = Scheduler(self._database, self._member, alone, Lifecycle(), ServerClock())
        try:
            await scheduler.schedule_due()
        finally:
            await scheduler.close()


def scheduled(action: Action[Any]) -> Action[Any]:
    if action.schedule is None:
        raise EngineError(f"the action {action.name!r} has no schedule: use `run` or `trigger`")
    return action
