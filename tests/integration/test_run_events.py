"""Run events: numbered without gaps, in the order of their emission, and only for the attempt that owns the run."""

import asyncio

import pytest

from app.fleet.engine.enqueue.orders import Order
from app.fleet.runs.effects.events import Event, append
from tests.support.engine_harness import NAMESPACE, EngineHarness, declare, engine_harness

pytestmark = pytest.mark.anyio


async def append_events(here: EngineHarness, *events: Event) -> set[tuple[int, int]]:
    async with here.database.autocommit() as connection:
        return await append(connection, NAMESPACE, events)


async def append_all(here: EngineHarness, *events: Event) -> None:
    """Append these events again until none is left out because another session has locked the row of its run."""
    while await append_events(here, *events):  # noqa: ASYNC110 — each round appends
        await asyncio.sleep(0)


async def test_concurrent_batches_use_each_event_number_once_without_gaps(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        (run_id,) = await here.trigger(Order("tick"))
        ((_, token, _),) = await (await here.instance("one")).claim()
        batches = [[Event(run_id, token, f"{number}-{nth}", None) for nth in range(5)] for number in range(20)]
        await asyncio.gather(*(append_all(here, *batch) for batch in batches))
        rows = await here.sql("SELECT seq, kind FROM run_events ORDER BY seq")
        assert [seq for seq, _ in rows] == list(range(3, 103)), "numbers 1 and 2 are the states pending and running"
        kinds = [kind for _, kind in rows]
        for first in kinds[::5]:
            at = kinds.index(first)
            number = first.partition("-")[0]
            assert kinds[at : at + 5] == [f"{number}-{nth}" for nth in range(5)], "a batch keeps its order"


async def test_a_batch_can_have_events_of_several_runs(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        first, second = await here.trigger(Order("tick"), Order("tick"))
        tokens = {run_id: token for run_id, token, _ in await (await here.instance("one")).claim()}
        events = [
            Event(first, tokens[first], "a", "1"),
            Event(second, tokens[second], "b", None),
            Event(first, tokens[first], "c", '{"x": 2}'),
        ]
        assert await append_events(here, *events) == set()
        rows = await here.sql("SELECT run_id, seq, kind, data FROM run_events ORDER BY run_id, seq")
        assert rows == [(first, 3, "a", 1), (first, 4, "c", {"x": 2}), (second, 3, "b", None)]


async def test_an_event_with_an_old_token_gets_no_number_and_is_reported_as_stale(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        stale, fresh = await here.trigger(Order("tick"), Order("tick"))
        tokens = {run_id: token for run_id, token, _ in await (await here.instance("one")).claim()}
        await here.sql("UPDATE runs SET token = token + 1 WHERE id = %s RETURNING 1", stale)
        events = [Event(run_id, tokens[run_id], "late", None) for run_id in (stale, fresh)]
        assert await append_events(here, *events) == {(stale, tokens[stale])}
        assert await here.sql("SELECT run_id, seq FROM run_events") == [(fresh, 3)]
        assert await here.sql("SELECT events FROM runs WHERE id = %s", stale) == [(2,)]


async def test_the_last_progress_of_a_batch_becomes_the_progress_of_the_run(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        (run_id,) = await here.trigger(Order("tick"))
        ((_, token, _),) = await (await here.instance("one")).claim()
        events = [Event(run_id, token, kind, data) for kind, data in (("progress", "1"), ("progress", "2"), ("x", "3"))]
        await append_events(here, *events)
        assert await here.sql("SELECT progress FROM runs") == [(2,)]
