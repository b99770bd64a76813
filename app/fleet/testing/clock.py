"""Time in tests: PostgreSQL's clock stays as it is, and everything that waits moves towards it.

`advance` moves the rows that wait for a time by a duration into the past: pending runs (delays of retries, `run_at`),
schedules, rates of actions, limits, and breakers. What was due in five minutes is due after `advance("5m")`.

It goes from slot to slot: each slot of a schedule that time passes gets its run at its turn, as in a running cluster,
and not as a slot that an outage has missed. The real scheduler inserts the runs. A slot is an instant of PostgreSQL's
clock, so `scheduled_for` is the time at which the test runs, also if the schedule is `cron`.

Not moved: rows of your own tables, the retention of finished runs and of keys of `once`, leases of locks, and the
deadline of an attempt that is being executed.
"""

from datetime import datetime, timedelta
from typing import Any

from app.fleet.cluster.member import Member
from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Connection, Database
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
    UPDATE {schema}.actions SET next_run_at = next_run_at - %(by)s, rate_used_until = rate_used_until - %(by)s
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

SET_SLOT = Statement("""
UPDATE {schema}.actions SET next_run_at = coalesce(%(slot)s, clock_timestamp()) WHERE id = %(action)s
""")

# The time until the first run is due that waits for a later time.
NEXT_RUN = Statement("""
SELECT min(run_at) - clock_timestamp() FROM {schema}.runs WHERE state = 'pending' AND run_at > clock_timestamp()
""")

# The rate of an action does not delay a run that a test executes by its id.
FREE_RATE = Statement("UPDATE {schema}.actions SET rate_used_until = '-infinity' WHERE name = %(action)s")


class TestClock:
    """Moves the time of one instance's namespace."""

    __test__ = False

    def __init__(self, database: Database, member: Member, catalogue: Catalogue) -> None:
        self._database = database
        self._sql = database.namespace.sql
        self._member = member
        self._catalogue = catalogue
        # How far the rows have been moved in all.
        self._moved = timedelta()

    async def make_due(self, action: Action[Any], slot: datetime | None) -> None:
        """Insert the run of a slot of an action: of this one, or of one that is due now."""
        if action.schedule is None:
            raise EngineError(f"the action {action.name!r} has no schedule: use `run` or `trigger`")
        async with self._database.autocommit() as connection:
            values = {"action": self._catalogue.id_of(action.name), "slot": slot}
            await connection.execute(self._sql(SET_SLOT), values)
        await self._insert_slot(action)

    async def advance(self, by: timedelta) -> timedelta:
        """Move time up to the next slot, but at most so far, and insert the run of the slot; return what is left."""
        async with self._database.autocommit() as connection:
            due = {"actions": self._catalogue.ids}
            row = await (await connection.execute(self._sql(NEXT_SLOT), due)).fetchone()
            if row is None or row[2] > by:
                await self._move(connection, by)
                return timedelta()
            name, slot, left = row
            step: timedelta = max(left, timedelta())
            await self._move(connection, step)
            action = self._catalogue[name]
            await self._insert_slot(action)
            if action.schedule is not None:
                # The scheduler has computed the next slot at PostgreSQL's time, which has not moved.
                following = action.schedule.after(slot - step + self._moved) - self._moved
                values = {"action": self._catalogue.id_of(name), "slot": following}
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

    async def _move(self, connection: Connection, by: timedelta) -> None:
        self._moved += by
        await connection.execute(self._sql(MOVE), {"by": by})

    async def _insert_slot(self, action: Action[Any]) -> None:
        """Have the scheduler look at this action alone."""
        alone = Catalogue({action.name: action})
        alone.set_ids({action.name: self._catalogue.id_of(action.name)})
        scheduler = Scheduler(self._database, self._member, alone, Lifecycle(), ServerClock())
        try:
            await scheduler.schedule_due()
        finally:
            await scheduler.close()
