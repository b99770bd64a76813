"""The delay before a retry follows from the options of the action, whichever instance makes the run pending."""

import pytest

from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.maintenance import rescuer
from app.fleet.runs.effects.notifications import WAITING_HEADING
from app.fleet.runs.requeue import REQUEUE
from tests.support.engine_harness import NAMESPACE, EngineHarness, declare, engine_harness

pytestmark = pytest.mark.anyio

# The delay in seconds by the number of failures: twice as long each time, up to the maximum.
WAITS = {1: 1, 2: 2, 3: 4, 4: 8, 5: 10, 500: 10}
# One attempt of each run was ended by the death of an instance, which does not count as a failure.
FAILED = """
UPDATE runs
SET attempt = 1 + (ARRAY[1, 2, 3, 4, 5, 500])[1 + id % 6], deaths = 1, deadline_at = now() - interval '1 h',
    max_attempts = 1000
RETURNING id, token
"""
WAITED = """
SELECT attempt - deaths, extract(epoch FROM run_at - clock_timestamp())::float8 FROM runs WHERE state = 'pending'
"""


async def give_back(here: EngineHarness, rows: list[tuple[int, int]]) -> None:
    count = len(rows)
    values: dict[str, object] = {"ids": [row[0] for row in rows], "tokens": [row[1] for row in rows]}
    values |= {
        "pauses": [False] * count,
        "delays": [None] * count,
        "errors": ["torn"] * count,
        "heading": WAITING_HEADING,
    }
    async with here.database.autocommit() as connection:
        await connection.execute(NAMESPACE.sql(REQUEUE), values)


async def sweep(here: EngineHarness, _: list[tuple[int, int]]) -> None:
    async with here.database.autocommit() as connection:
        await rescuer.sweep(connection, NAMESPACE)


@pytest.mark.parametrize("by", [give_back, sweep], ids=["its-own-instance", "another-instance"])
async def test_retry_delays_double_up_to_the_maximum_and_all_differ(address: str, by: object) -> None:
    async with engine_harness(address, declare(retry_delay="1s", max_retry_delay="10s")) as here:
        await here.trigger(*[Order("tick")] * 120)
        await (await here.instance("one")).claim(200)
        rows = await here.sql(FAILED)
        await by(here, rows)  # type: ignore[operator]
        waited: dict[int, list[float]] = {}
        for failures, seconds in await here.sql(WAITED):
            waited.setdefault(failures, []).append(seconds)
        assert {failures: len(waits) for failures, waits in waited.items()} == dict.fromkeys(WAITS, 20)
        for failures, about in WAITS.items():
            # Some of the delay has passed already.
            assert all(0.75 * about - 0.7 <= wait <= 1.25 * about for wait in waited[failures])
            assert len(set(waited[failures])) == 20


async def test_a_changed_retry_delay_applies_from_the_next_failure(address: str) -> None:
    async with engine_harness(address, declare(retry_delay="1s")) as here:
        await here.trigger(Order("tick"))
        await (await here.instance("one")).claim()
        async with engine_harness(address, declare(retry_delay="5m", max_retry_delay="1h")):
            await give_back(here, await here.sql("SELECT id, token FROM runs"))
        ((_, seconds),) = await here.sql(WAITED)
        assert 200 < seconds < 400
