"""Survival: an action has the same effects, wherever it dies.

`survives` executes the action once without a fault, and learns the points that the attempt reaches (`faults.py`). Then
it executes it again for each of these points, and lets the attempt die there. Each round is a new run, on what
`arrange` has prepared. `effects` returns what the run has left behind; every round must leave the same.

Before a round, the keys are deleted that earlier rounds have taken: those of `once`, and those of triggered runs.
Otherwise the action would find its work done. Everything else of an earlier round is still there.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Database
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.run import P
from app.fleet.runs.effects.states import RunState
from app.fleet.testing.faults import Point, dies_at
from app.fleet.testing.stored import StoredRun

if TYPE_CHECKING:
    from app.fleet.testing.instance import Instance

LAST_KEYS = Statement("""
SELECT (SELECT coalesce(max(token), 0) FROM {schema}.once_keys) AS last_token,
       (SELECT coalesce(max(run_id), 0) FROM {schema}.run_keys) AS last_run
""")
FORGET_LATER_KEYS = Statement("""
WITH keys_of_runs AS (DELETE FROM {schema}.run_keys WHERE run_id > %(last_run)s)
DELETE FROM {schema}.once_keys WHERE token > %(last_token)s
""")


async def survives(
    instance: "Instance",
    database: Database,
    action: Action[P] | str,
    arrange: Callable[[], Awaitable[P | None]],
    effects: Callable[[StoredRun], Awaitable[Any]],
) -> list[Point]:
    """Return the points at which the action has died; raise AssertionError if a death changes the effects."""
    sql = database.namespace.sql
    async with database.autocommit() as connection:
        row = await (await connection.execute(sql(LAST_KEYS))).fetchone()
    assert row is not None
    before = {"last_token": row[0], "last_run": row[1]}
    run = await instance.run(action, await arrange())
    if run.state is not RunState.SUCCEEDED:
        raise AssertionError(f"run {run.id} has {run.state} without a fault: {run.error}")
    points, expected = instance.points, await effects(run)
    for point in points:
        async with database.autocommit() as connection:
            await connection.execute(sql(FORGET_LATER_KEYS), before)
        run = await instance.run(action, await arrange(), dies_at(*point))
        if run.state is not RunState.SUCCEEDED:
            raise AssertionError(f"run {run.id} has {run.state} after it died at {point}: {run.error}")
        found = await effects(run)
        if found != expected:
            raise AssertionError(
                f"run {run.id} died at {point}, and its effects differ from the effects of a run that does not die:\n"
                f"  expected {expected!r}\n  found    {found!r}"
            )
    return list(points)
