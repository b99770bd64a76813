"""Two releases at once: what the code of one declares and that of the other does not."""

from datetime import UTC, datetime

import psycopg
import pytest

from app.fleet.db.pool.statements import array
from app.fleet.engine.enqueue.orders import Order
from app.fleet.runs.claim import CLAIM
from app.fleet.runs.effects.ordering import ORDERED
from tests.support.engine_harness import NAMESPACE, Claiming, EngineHarness, declare, engine_harness

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("limit", [{"concurrency": 1}, {"rate": "1/d"}, {"overlap": "queue"}])
async def test_a_limit_that_another_release_took_away_holds_nobody_up(address: str, limit: dict[str, str]) -> None:
    async with engine_harness(address, declare(**limit)) as here:
        await here.trigger(Order("tick"), Order("tick"))
        await here.sql("UPDATE actions SET concurrency = NULL, rate_interval = NULL, rate_burst = NULL RETURNING 1")
        assert len(await (await here.instance("one")).claim()) == 2


@pytest.mark.parametrize("limit", ["concurrency = 1", "rate_interval = 3600, rate_burst = 1"])
async def test_a_limit_that_another_release_has_brought_is_kept_by_those_that_do_not_know_it(
    address: str, limit: str
) -> None:
    async with engine_harness(address, declare()) as here:
        await here.trigger(Order("tick"), Order("tick"))
        one = await here.instance("one")
        await here.sql(f"UPDATE actions SET {limit} RETURNING 1")
        assert await one.claim() == [], "as long as nobody has told it"
        one.claimant.limited = {here.catalogue.id_of("tick")}
        assert len(await one.claim()) == 1
        assert await one.claim() == []


async def claim_as_if_there_were_no_lines(one: Claiming) -> list[int]:
    """As a release does that takes the place of lines for any other."""
    (action_id,) = one.harness.catalogue.ids
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    values = {"me": one.identity.id, "name": one.identity.name, "room": 4, "counted": False}
    values |= {"actions": array([action_id, action_id]), "priorities": array([0, ORDERED]), "mosts": "{4,4}"}
    values |= {"passed": "{0,0}", "floors": array([long_ago, long_ago]), "timeouts": "{60,60}"}
    async with one.harness.database.autocommit() as connection:
        rows = await (await connection.execute(NAMESPACE.sql(CLAIM), values)).fetchall()
    return [row[0] for row in rows]


async def running(here: EngineHarness) -> list[tuple[int]]:
    return await here.sql("SELECT id FROM runs WHERE state = 'running' ORDER BY id")


async def test_a_release_that_does_not_know_lines_never_runs_two_of_one(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        one, (first, second) = await here.instance("one"), await here.trigger(*[Order("tick", ordering_key="a")] * 2)
        with pytest.raises(psycopg.errors.UniqueViolation):
            await claim_as_if_there_were_no_lines(one)
        assert await running(here) == []
        assert [run.run_id for run in await (await here.instance("new")).claim()] == [first]
        with pytest.raises(psycopg.errors.UniqueViolation):
            await claim_as_if_there_were_no_lines(one)
        assert await running(here) == [(first,)]
        await here.sql("DELETE FROM runs WHERE id = %s RETURNING 1", first)
        assert await claim_as_if_there_were_no_lines(one) == [second]


async def test_runs_in_no_line_are_claimed_by_a_release_that_does_not_know_lines(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        made = await here.trigger(*[Order("tick")] * 4)
        await here.trigger(*[Order("tick", ordering_key="a")] * 4)
        assert await claim_as_if_there_were_no_lines(await here.instance("one")) == made
