"""`overlap="skip"`: at most one run of the action is active, that is, pending or running.

Every transaction that makes a run of such an action active (a slot, a trigger, an operator's retry) does two things, in
this order:

    1  take the action's advisory lock, which is held until the transaction ends
    2  look for an active run, in a separate statement

Only a statement that begins after the lock was granted sees what the previous holder of the lock has committed. A run
that becomes pending again (after a failure, a pause or the death of its instance) was active before and needs neither.

The lock is advisory and is not the action's row, because a caller's transaction may stay open for any time: meanwhile
the scheduler, claims, a pause and the start of an instance can use the row.

    caller                               while another transaction has the lock
    scheduler                            leaves this action out, schedules the others, and tries again
    trigger and retry without session    wait for `LOCK_PATIENCE`, then raise `AlreadyActive`: the other transaction
                                         makes a run active
    trigger in a caller's session        waits for the other transaction

Not guaranteed: anything while two releases disagree about the option. A trigger uses the option of its own code, the
scheduler and a retry use the option in the table.

Lock order: actions by id.
"""

from collections.abc import Collection

import psycopg

from app.fleet.db.namespace import Lock, Namespace, Statement
from app.fleet.db.pool.statements import Place, fetch
from app.fleet.errors import AlreadyActive

LOCK_PATIENCE = 1.0

# A frozen process must not hold the lock for longer than a lease.
BOUND = Statement(f"""
SELECT set_config('idle_in_transaction_session_timeout', '5000', true),
       set_config('lock_timeout', '{LOCK_PATIENCE * 1000:.0f}', true)
""")
UNBOUND = Statement("SET LOCAL lock_timeout TO DEFAULT")

# PostgreSQL takes the locks in the order of the array, which is sorted.
HOLD = Statement(f"""
SELECT pg_advisory_xact_lock({{class}}, {Lock.ACTION.key(0)} + id) FROM unnest(%(actions)s::int[]) AS w (id)
""")


def active_run(action_id: str) -> str:
    """Return the SQL expression for the id of an active run of an action, or null.

    ORDER BY follows the columns of an index, because without it the planner may read all of the table for the one row.
    """
    return f"""coalesce(
        (
            SELECT r.id
            FROM {{schema}}.runs AS r
            WHERE r.action_id = {action_id} AND r.state = 'running'
            ORDER BY r.action_id, r.instance_id
            LIMIT 1
        ),
        (
            SELECT r.id
            FROM {{schema}}.runs AS r
            WHERE r.action_id = {action_id} AND r.state = 'pending'
            ORDER BY r.action_id, r.id
            LIMIT 1
        )
    )"""


FIND_ACTIVE = Statement(f"SELECT w.id, {active_run('w.id')} FROM unnest(%(actions)s::int[]) AS w (id)")


async def hold(place: Place, namespace: Namespace, actions: Collection[int]) -> dict[int, int | None]:
    """Take the locks of these actions until the transaction ends; return the active run of each, if it has one."""
    values = {"actions": sorted(actions)}
    if not isinstance(place, psycopg.AsyncConnection):
        await fetch(place, namespace.sql(HOLD), values)
    else:
        # A connection of the pool, and not a caller's session: the wait is bounded.
        await place.execute(namespace.sql(BOUND))
        try:
            await place.execute(namespace.sql(HOLD), values)
        except psycopg.errors.LockNotAvailable:
            raise AlreadyActive(
                "another transaction is making a run of this action and is still open, and the action allows one at a "
                "time (overlap='skip'): try again when it has ended",
                None,
            ) from None
        await place.execute(UNBOUND)
    return dict(await fetch(place, namespace.sql(FIND_ACTIVE), values))


def already_active(name: str, run_id: int) -> AlreadyActive:
    return AlreadyActive(
        f"the action {name!r} has an active run, {run_id}, and allows one at a time (overlap='skip'): wait for it, or "
        f"cancel it",
        run_id,
    )
