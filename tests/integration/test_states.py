"""The states of a run: each statement names the state that it may change, so an unknown state is safe."""

import asyncio

import psycopg
import pytest

from app.fleet import Fenced
from app.fleet.engine.enqueue.orders import Order
from tests.support.engine_harness import declare, engine_harness
from tests.support.runs import local_instance

pytestmark = pytest.mark.anyio

ADD_A_STATE = """
ALTER TABLE flotilla.runs DROP CONSTRAINT runs_state_check;
ALTER TABLE flotilla.runs ADD CONSTRAINT runs_state_check CHECK (state IN ('pending', 'running', 'held'));
"""


def hold_all(address: str) -> None:
    with psycopg.connect(address) as connection:
        connection.execute(ADD_A_STATE)
        connection.execute("UPDATE flotilla.runs SET state = 'held'")


async def test_writes_of_an_attempt_are_fenced_if_its_run_has_an_unknown_state(address: str) -> None:
    async with local_instance(address) as here:
        ids = [await here.trigger("nap", {"seconds": 60}) for _ in range(6)]
        by_checkpoint, by_guard, by_commit, by_event = [await here.handle(each) for each in ids[:4]]
        by_end, by_retry = [await here.attempt(each) for each in ids[4:]]
        with here.without_comparison():
            await asyncio.to_thread(hold_all, address)
            with pytest.raises(Fenced):
                await by_checkpoint.checkpoint({"late": True})
            async with here.running.context.database.session() as session:
                with pytest.raises(Fenced):
                    await by_guard.guard(session)
            with pytest.raises(Fenced):
                async with by_commit.commit():
                    pass
            await by_event.emit("late")
            writer = here.engine.executor.writer
            writer.succeeded(by_end, None)
            writer.retry(by_retry, 0, "late")
            await writer.empty()
            states = await here.sql("SELECT state, events, checkpoint FROM runs")
            assert states == [("held", 2, None)] * 6
            assert await here.sql("SELECT id FROM finished_runs") == []
            assert writer.fenced["completion"] >= 2


async def test_a_run_in_an_unknown_state_is_not_claimed(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        await here.trigger(Order("tick"), Order("tick", ordering_key="a"))
        await asyncio.to_thread(hold_all, address)
        assert await (await here.instance("one")).claim() == []
