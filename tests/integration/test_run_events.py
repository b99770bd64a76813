"""Run events: numbered without gaps, in the order they were said, and only by the attempt that owns the run."""

import asyncio

import pytest

from app.fleet.engine.enqueue.orders import Order
from app.fleet.runs.effects.events import Event, append
from tests.support.engine_harness import NAMESPACE, EngineHarness, declare, engine_harness

pytestmark = pytest.mark.anyio


async def say(here: EngineHarness, *events: Event) -> set[tuple[int, int]]:
    async with here.database.autocommit() as connection:
        return await append(connection, NAMESPACE, events)


async def say_at_last(here: EngineHarness, *events: Event) -> None:
    """A row that another session has locked is left out, and what is to be written for it is given again."""
    while await say(here, *events):  # noqa: ASYNC110 — each time, it is tried
        await asyncio.sleep(0)


async def test_batches_that_overlap_draw_each_number_once_and_none_is_missing(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        (run_id,) = await here.trigger(Order("tick"))
        ((_, token, _),) = await (await here.instance("one")).claim()
        batches = [[Event(run_id, token, f"{number}-{nth}", None) for nth in range(5)] for number in range(20)]
        await asyncio.gather(*(say_at_last(here, *batch) for batch in batches))
        rows = await here.sql("SELECT seq, kind FROM run_events ORDER BY seq")
        assert [seq for seq, _ in rows] == list(range(3, 103)), "after that it was made, and began"
        said = [kind for _, kind in rows]
        for first in said[::5]:
            at = said.index(first)
            number = first.partition("-")[0]
            assert said[at : at + 5] == [f"{number}-{nth}" for nth in range(5)], "a batch keeps its order"


async def test_events_of_several_runs_go_in_one_batch(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        first, second = await here.trigger(Order("tick"), Order("tick"))
        tokens = {run_id: token for run_id, token, _ in await (await here.instance("one")).claim()}
        events = [
            Event(first, tokens[first], "a", "1"),
            Event(second, tokens[second], "b", None),
            Event(first, tokens[first], "c", '{"x": 2}'),
        ]
        assert await say(here, *events) == set()
        rows = await here.sql("SELECT run_id, seq, kind, data FROM run_events ORDER BY run_id, seq")
        assert rows == [(first, 3, "a", 1), (first, 4, "c", {"x": 2}), (second, 3, "b", None)]


async def test_an_old_token_draws_no_number_and_is_told(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        stale, fresh = await here.trigger(Order("tick"), Order("tick"))
        tokens = {run_id: token for run_id, token, _ in await (await here.instance("one")).claim()}
        await here.sql("UPDATE runs SET token = token + 1 WHERE id = %s RETURNING 1", stale)
        events = [Event(run_id, tokens[run_id], "late", None) for run_id in (stale, fresh)]
        assert await say(here, *events) == {(stale, tokens[stale])}
        assert await here.sql("SELECT run_id, seq FROM run_events") == [(fresh, 3)]
        assert await here.sql("SELECT events FROM runs WHERE id = %s", stale) == [(2,)]


async def test_the_last_progress_of_a_batch_is_the_runs(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        (run_id,) = await here.trigger(Order("tick"))
        ((_, token, _),) = await (await here.instance("one")).claim()
        events = [Event(run_id, token, kind, data) for kind, data in (("progress", "1"), ("progress", "2"), ("x", "3"))]
        await say(here, *events)
        assert await here.sql("SELECT progress FROM runs") == [(2,)]
