"""Following runs from the service's own code: what becomes of one, event by event, or just its result.

    async for event in follow(run_id):
        ...
    total = await result(run_id, timeout=30)

Both work wherever the run runs, and both are served by the instance's one reader (`app.fleet.stream.hub`).
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from app.fleet.engine.enqueue.trigger import here
from app.fleet.errors import RunFailed, RunUnknown
from app.fleet.runs.events import STATE, StoredEvent


async def follow(run_id: int, after: int = 0) -> AsyncIterator[StoredEvent]:
    """Yield what became of a run after that event, and then whatever becomes of it, until it ends."""
    async with here().hub.follow(run_id, after) as following:
        while not following.ended:
            for event in await following.more():
                yield event


async def result(run_id: int, timeout: float | None = None) -> Any:
    """Wait for a run to end, and return what it returned; `RunFailed` if it did not succeed, `TimeoutError` if late."""
    last: StoredEvent | None = None
    async with asyncio.timeout(timeout):
        # The last of those that are there may be its end.
        async for event in follow(run_id, await here().hub.count(run_id) - 1):
            last = event
    end = last.data if last is not None and last.kind == STATE else {}
    match end:
        case {"state": "succeeded", "result": result}:
            return result
        case {"state": "failed" | "cancelled" as state, "error": error}:
            raise RunFailed(f"run {run_id} {state}: {error}", run_id, state)
        case _:
            raise RunUnknown(f"run {run_id} was forgotten while somebody waited for it")
