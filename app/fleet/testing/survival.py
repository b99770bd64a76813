"""Survival: an action has the same effects, wherever it dies.

`survives` executes the action once without a fault, and learns the points that the attempt reaches (`faults.py`). Then
it executes it again for each of these points, and lets the attempt die there. Each round is a new run, on what
`arrange` has prepared. `effects` returns what the run has left behind; every round must leave the same.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.run import P
from app.fleet.runs.effects.states import RunState
from app.fleet.testing.faults import Point, dies_at
from app.fleet.testing.stored import StoredRun

if TYPE_CHECKING:
    from app.fleet.testing.instance import Instance


async def survives(
    instance: "Instance",
    action: Action[P] | str,
    arrange: Callable[[], Awaitable[P | None]],
    effects: Callable[[StoredRun], Awaitable[Any]],
) -> list[Point]:
    """Return the points at which the action has died; raise AssertionError if a death changes the effects."""
    run = await instance.run(action, await arrange())
    if run.state is not RunState.SUCCEEDED:
        raise AssertionError(f"run {run.id} has {run.state} without a fault: {run.error}")
    points, expected = instance.points, await effects(run)
    for point in points:
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
