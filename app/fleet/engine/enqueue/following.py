"""Following runs from the service's own code: the events of a run, or only its result.

    async for event in follow(run_id):
        ...
    total = await result(run_id, timeout=30)

Both work for any run of the cluster. The instance's hub reads the events for all followers (`stream/hub.py`).
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from app.fleet.engine.enqueue.trigger import here
from app.fleet.errors import RunFailed, RunUnknown
from app.fleet.runs.effects.events import STATE, StoredEvent
from app.fleet.runs.effects.states import RunState


async def follow(run_id: int, after: int = 0) -> AsyncIterator[StoredEvent]:
    """Yield the events of a run after this number: the existing ones, and then each new one, until the run ends."""
    async with here().hub.follow(run_id, after) as follower:
        while not follower.ended:
            for event in await follower.more():
                yield event


async def result(run_id: int, timeout: float | None = None) -> Any:
    """Wait until a run has ended, and return its result; `RunFailed` if it did not succeed, `TimeoutError` if late."""
    last: StoredEvent | None = None
    async with asyncio.timeout(timeout):
        # The last event that exists may be the run's end.
        async for event in follow(run_id, await here().hub.count(run_id) - 1):
            last = event
    end = last.data if last is not None and last.kind == STATE else {}
    match end:
        case {"state": RunState.SUCCEEDED, "result": result}:
            return result
        case {"state": RunState.FAILED | RunState.CANCELLED as state, "error": error}:
            raise RunFailed(f"run {run_id} {state}: {error}", run_id, state)
        case _:
            raise RunUnknown(f"run {run_id} was pruned before its result could be read")
