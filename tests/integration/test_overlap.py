"""`overlap="skip"`: at most one run of the action is active, and no other action waits because of that."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import AlreadyActive
from app.fleet.db.pool.pool import Connection
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.enqueue.trigger import Triggers
from app.fleet.runs import overlap
from app.fleet.runs.retry import Retried, retry_run, retry_runs
from app.fleet.stream.hub import Hub
from app.fleet.stream.relay import Relay
from tests.support.engine_harness import NAMESPACE, EngineHarness, declare, engine_harness
from tests.support.postgres import BOUND

pytestmark = pytest.mark.anyio
POSTGRES_VERSIONS = (18, 16)
FINISHED = """
INSERT INTO finished_runs (id, action_id, state, priority, run_at, token, attempt, max_attempts, trigger, events,
                           created_at, finished_at, expires_at)
SELECT nextval('runs_id_seq'), a.id, 'failed', 0, now(), 1, 1, 1, 'code', 3, now(), now(), now() + interval '1 day'
FROM actions AS a, generate_series(1, %s)
WHERE a.name = 'alone'
RETURNING id
"""


@pytest.fixture
async def here(address: str) -> AsyncIterator[EngineHarness]:
    async with engine_harness(
        address, declare("alone", every="1h", overlap="skip"), declare("other", every="1h")
    ) as own:
        yield own


async def insert_failed(here: EngineHarness, count: int) -> list[int]:
    return [row[0] for row in await here.sql(FINISHED, count)]


async def active(here: EngineHarness) -> list[int]:
    """Return the pending and running runs of the action."""
    statement = "SELECT r.id FROM runs AS r JOIN actions AS a ON a.id = r.action_id WHERE a.name = 'alone' ORDER BY 1"
    return [row[0] for row in await here.sql(statement)]


async def trigger(here: EngineHarness, session: AsyncSession) -> int:
    triggers = Triggers(here.database, here.catalogue, Hub(here.database, Relay(here.database)))
    (done,) = await triggers.trigger([Order("alone")], session)
    return done.id


@asynccontextmanager
async def autocommit(here: EngineHarness) -> AsyncIterator[Connection]:
    async with here.database.autocommit() as connection:
        yield connection


async def retry(here: EngineHarness, run_id: int) -> None:
    async with autocommit(here) as connection:
        await retry_run(connection, NAMESPACE, run_id)


async def retry_all(here: EngineHarness, **options: Any) -> Retried:
    async with autocommit(here) as connection:
        return await retry_runs(connection, NAMESPACE, here.catalogue.id_of("alone"), **options)


# -- a caller's transaction -------------------------------------------------------------------------------------------


async def test_a_slot_inserts_no_run_beside_a_run_of_an_open_transaction(here: EngineHarness) -> None:
    scheduler = await here.scheduler()
    slot = await here.due(name="alone")
    async with here.database.session() as session:
        made = await trigger(here, session)
        await asyncio.wait_for(scheduler.schedule_due(), BOUND)
    await scheduler.schedule_due()
    assert await active(here) == [made]
    assert await here.sql("SELECT next_run_at FROM actions WHERE name = 'alone'") == [(slot + timedelta(hours=1),)]


async def test_a_slot_inserts_its_run_after_the_open_transaction_is_rolled_back(here: EngineHarness) -> None:
    scheduler = await here.scheduler()
    slot = await here.due(name="alone")
    async with here.database.session() as session:
        await trigger(here, session)
        await asyncio.wait_for(scheduler.schedule_due(), BOUND)
        await session.rollback()
    await scheduler.schedule_due()
    assert await here.slots() == [slot]


async def test_an_open_transaction_with_a_trigger_does_not_delay_other_actions(here: EngineHarness) -> None:
    scheduler = await here.scheduler()
    await here.due(name="alone")
    slot = await here.due(name="other")
    async with here.database.session() as session:
        await trigger(here, session)
        await asyncio.wait_for(scheduler.schedule_due(), BOUND)
        assert await here.slots() == [slot]
        # The scheduler reads the action itself again soon, without a notification.
        assert scheduler._due is not None
        assert scheduler._due - asyncio.get_running_loop().time() < 1


async def test_a_locked_action_row_does_not_delay_other_actions(here: EngineHarness) -> None:
    """The start of an instance and a claim of a limited action lock the row in the same way."""
    scheduler = await here.scheduler()
    late = await here.due(name="alone")
    slot = await here.due(name="other")
    with psycopg.connect(here.address) as holder:
        holder.execute("SELECT FROM flotilla.actions WHERE name = 'alone' FOR NO KEY UPDATE")
        await asyncio.wait_for(scheduler.schedule_due(), BOUND)
        assert await here.slots() == [slot]
    await scheduler.schedule_due()
    assert await here.slots() == [late, slot]


async def test_an_open_transaction_with_a_trigger_blocks_neither_pauses_nor_claims(here: EngineHarness) -> None:
    one = await here.instance("one")
    async with here.database.session() as session:
        await trigger(here, session)
        with psycopg.connect(here.address, autocommit=True) as operator:
            operator.execute("SET lock_timeout = '5s'")
            operator.execute("UPDATE flotilla.actions SET paused_at = now() WHERE name = 'alone'")
            operator.execute("UPDATE flotilla.actions SET paused_at = NULL, concurrency = 1 WHERE name = 'alone'")
        one.claimant.limited = {here.catalogue.id_of("alone")}
    assert [run.run_id for run in await one.claim()] == await active(here)


async def test_a_trigger_beside_a_run_of_an_open_transaction_is_refused_after_a_short_wait(
    here: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "BOUND", overlap.BOUND.replace("1000", "50"))
    async with here.database.session() as session:
        made = await trigger(here, session)
        with pytest.raises(AlreadyActive) as refused:
            await asyncio.wait_for(here.trigger(Order("alone")), BOUND)
        assert refused.value.run_id is None
    with pytest.raises(AlreadyActive) as refused:
        await here.trigger(Order("alone"))
    assert refused.value.run_id == made


# -- an operator ------------------------------------------------------------------------------------------------------


async def test_a_retry_is_refused_while_another_run_is_active(here: EngineHarness) -> None:
    (old,) = await insert_failed(here, 1)
    (made,) = await here.trigger(Order("alone"))
    with pytest.raises(AlreadyActive) as refused:
        await retry(here, old)
    assert refused.value.run_id == made
    assert await active(here) == [made]
    await here.sql("DELETE FROM runs RETURNING 1")
    await retry(here, old)
    assert await active(here) == [old]
    await retry(here, old)
    assert await active(here) == [old], "the pending run itself is not another active run"


async def test_a_retry_of_many_runs_retries_one_and_returns_the_number_left_out(here: EngineHarness) -> None:
    old = await insert_failed(here, 5)
    assert await retry_all(here) == (1, 4)
    assert await active(here) == old[:1]
    assert await retry_all(here) == (0, 4)
    assert await retry_all(here, limit=2) == (0, 2)
    assert await active(here) == old[:1]


async def test_a_retry_of_many_runs_of_another_action_retries_them_all(here: EngineHarness) -> None:
    await insert_failed(here, 3)
    await here.sql("UPDATE actions SET overlap = 'allow' RETURNING 1")
    assert await retry_all(here) == (3, 0)


# -- all at the same time ---------------------------------------------------------------------------------------------


async def test_concurrent_triggers_slots_and_retries_make_only_one_run_active(here: EngineHarness) -> None:
    schedulers = [await here.scheduler() for _ in range(2)]

    async def in_a_session() -> None:
        async with here.database.session() as session:
            await trigger(here, session)
            await asyncio.sleep(0)

    for _ in range(25):
        old = await insert_failed(here, 4)
        await here.due(name="alone")
        done = await asyncio.gather(
            *(scheduler.schedule_due() for scheduler in schedulers),
            in_a_session(),
            here.trigger(Order("alone")),
            retry(here, old[0]),
            retry(here, old[1]),
            retry_all(here),
            return_exceptions=True,
        )
        refused = [each for each in done if isinstance(each, BaseException)]
        assert all(isinstance(each, AlreadyActive) for each in refused), refused
        assert len(await active(here)) == 1
        await here.sql("DELETE FROM runs RETURNING 1")
        await here.sql("DELETE FROM finished_runs RETURNING 1")


# -- cost -------------------------------------------------------------------------------------------------------------


async def test_the_search_for_an_active_run_does_not_read_the_pending_runs(here: EngineHarness) -> None:
    """Neither the pending runs of another action nor those of the action itself."""
    other = here.catalogue.id_of("other")
    await here.sql(
        "INSERT INTO runs (action_id, priority, run_at, max_attempts, trigger) "
        "SELECT %s, n %% 3, now(), 1, 'code' FROM generate_series(1, 300000) AS n RETURNING 1",
        other,
    )
    with psycopg.connect(here.address, autocommit=True) as session:
        session.execute("VACUUM ANALYZE flotilla.runs")
    for name in ("alone", "other"):
        async with here.database.connection() as connection:
            explain = b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + NAMESPACE.sql(overlap.FIND_ACTIVE)
            values = {"actions": [here.catalogue.id_of(name)]}
            ((plan,),) = await (await connection.execute(explain, values)).fetchall()
        top = plan[0]["Plan"]
        assert top["Shared Hit Blocks"] + top["Shared Read Blocks"] < 50, plan


async def test_a_run_with_a_later_run_at_counts_as_active(here: EngineHarness) -> None:
    await here.trigger(Order("alone", run_at=datetime.now(UTC) + timedelta(days=1)))
    with pytest.raises(AlreadyActive):
        await here.trigger(Order("alone"))
