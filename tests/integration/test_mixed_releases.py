"""Two releases at the same time: limits and ordering keys that only one of them knows."""

from datetime import UTC, datetime

import psycopg
import pytest

from app.fleet.db.namespace import Statement
from app.fleet.db.pool.statements import array
from app.fleet.engine.enqueue.orders import Order
from app.fleet.runs.claim import CLAIM
from tests.support.engine_harness import NAMESPACE, Claiming, EngineHarness, declare, engine_harness

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("limit", [{"concurrency": 1}, {"rate": "1/d"}, {"overlap": "queue"}])
async def test_a_limit_that_another_release_has_removed_no_longer_applies(address: str, limit: dict[str, str]) -> None:
    async with engine_harness(address, declare(**limit)) as here:
        await here.trigger(Order("tick"), Order("tick"))
        await here.sql("UPDATE actions SET concurrency = NULL, rate_interval = NULL, rate_burst = NULL RETURNING 1")
        assert len(await (await here.instance("one")).claim()) == 2


@pytest.mark.parametrize("limit", ["concurrency = 1", "rate_interval = 3600, rate_burst = 1"])
async def test_a_limit_that_only_another_release_declares_applies_to_this_one(address: str, limit: str) -> None:
    async with engine_harness(address, declare()) as here:
        await here.trigger(Order("tick"), Order("tick"))
        one = await here.instance("one")
        await here.sql(f"UPDATE actions SET {limit} RETURNING 1")
        assert await one.claim() == [], "this instance has not read the limit yet"
        one.claimant.limited = {here.catalogue.id_of("tick")}
        assert len(await one.claim()) == 1
        assert await one.claim() == []


# The claim of a release that does not know ordering keys: it takes any pending run of a priority.
CLAIM_WITHOUT_KEYS = Statement(CLAIM.replace("ordering_key IS NULL AND ", ""))


async def claim_without_keys(one: Claiming) -> list[int]:
    (action_id,) = one.harness.catalogue.ids
    values = {"me": one.identity.id, "name": one.identity.name, "room": 4, "counted": False}
    values |= {"actions": array([action_id]), "priorities": "{0}", "mosts": "{4}", "passed": "{0}", "timeouts": "{60}"}
    values |= {"floors": array([datetime(2020, 1, 1, tzinfo=UTC)])}
    async with one.harness.database.autocommit() as connection:
        rows = await (await connection.execute(NAMESPACE.sql(CLAIM_WITHOUT_KEYS), values)).fetchall()
    return [row[0] for row in rows]


async def running(here: EngineHarness) -> list[tuple[int]]:
    return await here.sql("SELECT id FROM runs WHERE state = 'running' ORDER BY id")


async def test_a_release_that_does_not_know_ordering_keys_never_starts_two_runs_of_one_key(address: str) -> None:
    assert CLAIM_WITHOUT_KEYS != CLAIM
    async with engine_harness(address, declare()) as here:
        one, (first, second) = await here.instance("one"), await here.trigger(*[Order("tick", ordering_key="a")] * 2)
        with pytest.raises(psycopg.errors.UniqueViolation):
            await claim_without_keys(one)
        assert await running(here) == []
        assert [run.run_id for run in await (await here.instance("new")).claim()] == [first]
        with pytest.raises(psycopg.errors.UniqueViolation):
            await claim_without_keys(one)
        assert await running(here) == [(first,)]
        await here.sql("DELETE FROM runs WHERE id = %s RETURNING 1", first)
        assert await claim_without_keys(one) == [second]
