"""Which runs the reconciler reads, and which it does not change: runs of a claim in progress, and ended runs."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from app.fleet.db.pool.statements import array
from app.fleet.db.server_clock import ServerClock
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.maintenance import reconciler
from app.fleet.engine.maintenance.reconciler import READ_ALL, TURN, Reconciler
from tests.support.engine_harness import NAMESPACE, declare, engine_harness
from tests.support.postgres import Postgres
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "INTERVAL", 0.05)


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address) as own:
        yield own


async def wait_for_reads(here: LocalInstance, count: int = 4) -> None:
    """Wait until the reconciler has read this many times from now on."""
    before = here.engine.reconciler.reads

    async def has_read() -> bool:
        return here.engine.reconciler.reads >= before + count

    await soon(has_read)


async def test_the_reconciler_does_not_touch_runs_of_a_claim_in_progress(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimant, gate, taken = here.engine.claimant, asyncio.Event(), asyncio.Event()
    genuine = claimant.claim

    async def return_later(*given: Any) -> list[tuple[Any, ...]]:
        rows = await genuine(*given)
        if rows:
            taken.set()
            await gate.wait()
        return rows

    monkeypatch.setattr(claimant, "claim", return_later)
    run_id = await here.trigger("echo")
    await taken.wait()
    await wait_for_reads(here)
    assert await here.sql("SELECT state, token FROM runs WHERE id = %s", run_id) == [("running", 1)]
    gate.set()
    assert (await here.ended(run_id)).attempt == 1
    assert await here.sql("SELECT token FROM finished_runs WHERE id = %s", run_id) == [(1,)]


async def test_a_run_that_ended_during_an_outage_is_not_rescued_as_overdue(
    own_postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = own_postgres.new_migrated_database()
    async with local_instance(address) as owner, local_instance(address) as other:
        await owner.wait_for_leader()
        other.running.context.lifecycle.draining.set()
        attempt = await owner.attempt(await owner.trigger("nap", {"seconds": 0.5}))
        writer = owner.engine.executor.writer
        genuine, gate = writer._finish, asyncio.Event()

        async def write_later(*given: Any) -> None:
            await gate.wait()
            await genuine(*given)

        monkeypatch.setattr(writer, "_finish", write_later)
        await asyncio.to_thread(own_postgres.stop, "immediate")
        assert attempt.task is not None
        await asyncio.wait([attempt.task])
        await asyncio.to_thread(own_postgres.start_again)
        with psycopg.connect(address) as back:
            # As if the outage had lasted beyond the deadline of the run and the grace period after it.
            back.execute("UPDATE flotilla.runs SET deadline_at = now() - interval '1 h'")
        for each in (owner, other):
            await wait_for_reads(each)
        gate.set()
        run = await owner.ended(attempt.run_id)
        assert (run.state, run.attempt) == ("succeeded", 1)


async def test_a_reconciler_that_fails_repeatedly_logs_a_warning(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await wait_for_reads(here, 1)
    broken = reconciler.READ_ALL.replace("clock_timestamp()", "'58028-01-01'::timestamptz")
    monkeypatch.setattr(reconciler, "READ_ALL", broken)

    async def warned() -> bool:
        return any(each.levelname == "WARNING" and each.msg == "reconciler.failed" for each in caplog.records)

    await soon(warned)


async def test_an_instance_reads_only_the_running_runs_of_its_own(address: str) -> None:
    async with engine_harness(address, declare("one"), declare("two")) as here:
        instances = [await here.instance(f"i-{number}") for number in range(3)]
        for instance in instances:
            await here.trigger(*[Order("one")] * 40, *[Order("two")] * 10)
            assert len(await instance.claim()) == 50
        await here.sql("ANALYZE runs")
        values = {
            "me": instances[1].identity.id,
            "actions": array(here.catalogue.ids),
            "slack": 8.0,
            "all_instances": False,
        }
        async with here.database.connection() as connection:
            # With so few rows, the planner would choose a sequential scan.
            await connection.execute("SET LOCAL enable_seqscan = off")
            explain = b"EXPLAIN (ANALYZE, FORMAT JSON) " + NAMESPACE.sql(READ_ALL)
            ((plan,),) = await (await connection.execute(explain, values)).fetchall()
        assert rows_of_runs(plan[0]["Plan"]) == 50


def rows_of_runs(plan: dict[str, Any]) -> float:
    own = 0
    if plan.get("Relation Name") == "runs":
        own = (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    return own + sum(rows_of_runs(part) for part in plan.get("Plans", []))


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_one_follower_at_a_time_reads_the_runs_of_all_instances(count: int) -> None:
    clock = ServerClock()
    member: Any = SimpleNamespace(leading=False)
    each: Any = None
    followers = [Reconciler(each, member, each, each, each, each, each, clock, each) for _ in range(count)]
    turns = []
    for number in range(4 * count):
        clock.learn(datetime.fromtimestamp(1e9 + TURN * (number / 2), UTC), asyncio.get_running_loop().time())
        for place, follower in enumerate(followers):
            follower._position = (place, count)
        turns.append([place for place, follower in enumerate(followers) if follower._reads_all()])
    assert all(len(turn) == 1 for turn in turns)
    assert {place for (place,) in turns} == set(range(count)), "each of them has its turn"
    member.leading = True
    assert all(follower._reads_all() for follower in followers)
