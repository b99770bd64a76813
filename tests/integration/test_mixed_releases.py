"""Two releases at once: what the code of one declares and that of the other does not."""

import pytest

from app.fleet.engine.trigger import Order
from tests.support.table import declare, table

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("limit", [{"concurrency": 1}, {"rate": "1/d"}, {"overlap": "queue"}])
async def test_a_limit_that_another_release_took_away_holds_nobody_up(address: str, limit: dict[str, str]) -> None:
    async with table(address, declare(**limit)) as here:
        await here.trigger(Order("tick"), Order("tick"))
        await here.sql("UPDATE actions SET concurrency = NULL, rate_interval = NULL, rate_burst = NULL RETURNING 1")
        assert len(await (await here.instance("one")).claim()) == 2


@pytest.mark.parametrize("limit", ["concurrency = 1", "rate_interval = 3600, rate_burst = 1"])
async def test_a_limit_that_another_release_has_brought_is_kept_by_those_that_do_not_know_it(
    address: str, limit: str
) -> None:
    async with table(address, declare()) as here:
        await here.trigger(Order("tick"), Order("tick"))
        one = await here.instance("one")
        await here.sql(f"UPDATE actions SET {limit} RETURNING 1")
        assert await one.claim() == [], "as long as nobody has told it"
        one.claimant.limited = {here.catalogue.id_of("tick")}
        assert len(await one.claim()) == 1
        assert await one.claim() == []
