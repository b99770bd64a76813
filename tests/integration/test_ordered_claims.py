"""Ordered runs: runs with the same ordering key run one after another, in the order of their ids.

This holds whichever instance claims them, and whether a run fails, waits for a retry, or loses its instance.
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import TupleRow

from app.fleet.cluster.registry import Registry
from app.fleet.db.namespace import Statement
from app.fleet.db.pool.statements import array
from app.fleet.duration import RATE_TOLERANCE
from app.fleet.engine.dispatch import ordered
from app.fleet.engine.dispatch.backlog import QueueKey
from app.fleet.engine.dispatch.ordered import ScanCursor
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.maintenance.rescuer import Rescue
from app.fleet.errors import EngineError
from app.fleet.runs.claim import CLAIM
from app.fleet.runs.claim_ordered import CLAIM_ORDERED
from app.fleet.runs.end import FINISH
from app.fleet.runs.retry import retry_run
from tests.support.engine_harness import NAMESPACE, Claimed, Claiming, EngineHarness, declare, engine_harness
from tests.support.runs import soon

pytestmark = pytest.mark.anyio
POSTGRES_VERSIONS = (18, 16)

END = "DELETE FROM runs WHERE id = ANY (%s) RETURNING 1"


def ids(claimed: Sequence[Claimed]) -> list[int]:
    return sorted(run.run_id for run in claimed)


async def trigger_ordered(here: EngineHarness, ordering_key: str, count: int, **order: Any) -> list[int]:
    return await here.trigger(*[Order("tick", ordering_key=ordering_key, **order)] * count)


# -- which runs may be claimed ----------------------------------------------------------------------------------------


async def test_only_the_head_of_each_key_is_claimed_and_the_next_run_after_its_end(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        waiting = {key: await trigger_ordered(here, key, 4) for key in ("a", "b", "c")}
        claiming = [await here.instance(f"i-{number}") for number in range(4)]
        while any(waiting.values()):
            shares = await asyncio.gather(*(each.claim() for each in claiming))
            claimed = [run.run_id for share in shares for run in share]
            assert sorted(claimed) == sorted(left[0] for left in waiting.values() if left)
            await here.sql(END, claimed)
            waiting = {key: left[1:] for key, left in waiting.items()}


async def test_runs_of_two_actions_with_the_same_ordering_key_do_not_wait_for_each_other(address: str) -> None:
    async with engine_harness(address, declare("tick"), declare("tock")) as here:
        first, _, other = await here.trigger(*[Order(name, ordering_key="a") for name in ("tick", "tick", "tock")])
        assert ids(await (await here.instance("one")).claim()) == [first, other]


async def test_a_run_with_a_higher_priority_does_not_overtake_an_earlier_run_of_its_key(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        first, _ = await here.trigger(
            Order("tick", ordering_key="a", priority=-5), Order("tick", ordering_key="a", priority=9)
        )
        assert await (await here.instance("one")).claim() == [Claimed(first, 1, -5)], "its priority is still -5"


@pytest.mark.parametrize(
    "held",
    [
        "UPDATE runs SET run_at = now() + interval '1 h' WHERE id = %s RETURNING 1",
        "UPDATE runs SET attempt = 1, run_at = now() + interval '1 h', error = 'torn' WHERE id = %s RETURNING 1",
    ],
    ids=["for-later", "waits-for-its-retry"],
)
async def test_a_head_that_is_not_due_blocks_its_key_and_sets_the_next_claim_time(address: str, held: str) -> None:
    async with engine_harness(address, declare()) as here:
        first, *_ = await trigger_ordered(here, "a", 3)
        (other,) = await trigger_ordered(here, "b", 1)
        await here.sql(held, first)
        one = await here.instance("one")
        assert ids(await one.claim()) == [other]
        due = one.backlog.next_due()
        assert due is not None
        assert 3500 < due - asyncio.get_running_loop().time() < 3700
        await here.sql("UPDATE runs SET run_at = now() WHERE id = %s RETURNING 1", first)
        assert ids(await one.claim()) == [first]


async def test_a_run_of_a_dead_instance_blocks_its_key_and_is_then_claimed_first(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        first, second = await trigger_ordered(here, "a", 2)
        one, two = await here.instance("one"), await here.instance("two")
        assert ids(await one.claim()) == [first]
        assert await two.claim() == []
        register = Registry(NAMESPACE, [Rescue(NAMESPACE)])
        with psycopg.connect(address, autocommit=True) as leader:
            assert register.declare_gone(leader, one.identity.id, "it looks dead") == "one"
        assert ids(await two.claim()) == [first]
        await here.sql(END, [first])
        assert ids(await two.claim()) == [second]


async def test_an_instance_that_was_declared_gone_claims_no_ordered_run(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        await trigger_ordered(here, "a", 1)
        one = await here.instance("one")
        await here.sql("UPDATE instances SET state = 'gone' RETURNING 1")
        assert await one.claim() == []


async def test_a_claim_skips_a_locked_head_and_all_other_runs_of_its_key(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        first, _ = await trigger_ordered(here, "a", 2)
        one = await here.instance("one")
        with psycopg.connect(address) as holder:
            holder.execute("SELECT 1 FROM flotilla.runs WHERE id = %s FOR UPDATE", [first])
            assert await one.claim() == []
        assert ids(await one.claim()) == [first]


# -- two transactions that are open at the same time ------------------------------------------------------------------

INSERT = """
INSERT INTO flotilla.runs (action_id, priority, run_at, max_attempts, trigger, ordering_key)
VALUES (%s, %s, now(), 1, 'code', 'a')
RETURNING id
"""


def insert(session: psycopg.Connection[TupleRow], here: EngineHarness) -> int:
    row = session.execute(INSERT, [here.catalogue.id_of("tick"), 0]).fetchone()
    assert row is not None
    return int(row[0])


async def test_a_run_that_commits_late_waits_for_the_running_run_and_precedes_the_pending_ones(
    address: str,
) -> None:
    async with engine_harness(address, declare()) as here:
        one, two = await here.instance("one"), await here.instance("two")
        with psycopg.connect(address) as slow:
            early = insert(slow, here)
            later, last = await trigger_ordered(here, "a", 2)
            assert ids(await one.claim()) == [later]
        assert early < later
        assert await two.claim() == await one.claim() == []
        await here.sql(END, [later])
        assert ids(await two.claim()) == [early]
        await here.sql(END, [early])
        assert ids(await two.claim()) == [last]


async def test_two_claims_that_read_different_heads_of_a_key_do_not_both_claim(address: str) -> None:
    """Interleaved by hand: claim 1 has not committed when claim 2 reads a head with a lower id."""
    async with engine_harness(address, declare()) as here:
        one, two = await here.instance("one"), await here.instance("two")
        slow = psycopg.connect(address)
        early = insert(slow, here)
        (later,) = await trigger_ordered(here, "a", 1)
        async with here.database.connection() as connection:
            assert ids(await claim_on(one, connection)) == [later]
            slow.commit()
            slow.close()
            second = asyncio.create_task(two.claim())
            waits = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ 'RECURSIVE me'"
            await soon(lambda: here.sql(waits))
        assert await second == []
        assert await here.sql("SELECT id FROM runs WHERE state = 'running'") == [(later,)]
        due = two.backlog.next_due()
        assert due is not None
        assert due - asyncio.get_running_loop().time() < 1, "the instance scans again soon"
        await here.sql(END, [later])
        assert ids(await two.claim()) == [early]


async def claim_on(one: Claiming, connection: Any) -> list[Claimed]:
    now = asyncio.get_running_loop().time()
    one.backlog.add(one.harness.catalogue.id_of("tick"), None, datetime(2020, 1, 1, tzinfo=UTC), now)
    rows = await one.claimant.claim(connection, one.identity, one.backlog.due(now), 10, now)
    return [Claimed(row[0], row[2], row[6]) for row in rows]


async def test_the_unique_index_refuses_a_second_running_run_of_a_key(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        await trigger_ordered(here, "a", 2)
        with pytest.raises(psycopg.errors.UniqueViolation):
            await here.sql("UPDATE runs SET state = 'running'")


# -- the scan of the ordering keys ------------------------------------------------------------------------------------


async def test_claims_take_the_ordering_keys_in_turn(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        for key in ("a", "b", "c"):
            await trigger_ordered(here, key, 3)
        one, turns = await here.instance("one"), []
        for _ in range(9):
            ((run_id, _, _),) = await one.claim(room=1)
            turns += [key for (key,) in await here.sql("DELETE FROM runs WHERE id = %s RETURNING ordering_key", run_id)]
            # The next run of this key may be claimed now, but it is the turn of the other keys.
            one.backlog.add_next_of(here.catalogue.id_of("tick"), turns[-1])
        assert turns == ["a", "b", "c"] * 3


async def test_successive_claims_scan_all_keys_if_there_are_more_than_max_keys(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered, "MAX_KEYS", 3)
    monkeypatch.setattr(ordered, "PAUSE", 0.0)
    async with engine_harness(address, declare()) as here:
        for number in range(10):
            await trigger_ordered(here, f"line-{number}", 1)
        await here.sql("UPDATE runs SET run_at = now() + interval '1 h' WHERE ordering_key <> 'line-7' RETURNING 1")
        one, claims = await here.instance("one"), 0
        await notify(one)
        while one.backlog.due(asyncio.get_running_loop().time()):
            claims += 1
            for run in await one.claim(everywhere=False):
                assert (claims, await key_of(here, run.run_id)) == (3, "line-7")
        assert claims == 4
        due = one.backlog.next_due()
        assert due is not None
        assert due - asyncio.get_running_loop().time() > 3500, (
            "the other heads are due in an hour, and the backlog knows this time"
        )


async def test_a_scan_pauses_after_its_round_and_requested_keys_do_not_wait_for_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two keys of a thousand: a pause of two minutes.
    monkeypatch.setattr(ordered, "PAUSE", 60_000.0)
    async with engine_harness(address, declare()) as here:
        (first,) = await trigger_ordered(here, "a", 1)
        await trigger_ordered(here, "b", 2)
        one, loop = await here.instance("one"), asyncio.get_running_loop()
        await here.sql("UPDATE runs SET run_at = now() + interval '1 h' WHERE id = %s RETURNING 1", first)
        await notify(one)
        (run,) = await one.claim(everywhere=False)
        await notify(one)
        assert one.backlog.due(loop.time()) == []
        due = one.backlog.next_due()
        assert due is not None
        assert 60 < due - loop.time() < 125, "the pause is proportional to the two keys scanned"
        await here.sql(END, [run.run_id])
        one.backlog.add_next_of(here.catalogue.id_of("tick"), "b")
        assert len(await one.claim(everywhere=False)) == 1


async def test_a_scan_that_has_not_finished_its_round_pauses_too(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "MAX_KEYS", 1)
    monkeypatch.setattr(ordered, "PAUSE", 3600.0)
    async with engine_harness(address, declare()) as here:
        later = datetime.now(UTC) + timedelta(days=1)
        for key in ("a", "b"):
            await trigger_ordered(here, key, 1, run_at=later)
        one, loop = await here.instance("one"), asyncio.get_running_loop()
        await notify(one)
        assert await one.claim(everywhere=False) == []
        await notify(one)
        assert one.backlog.due(loop.time()) == []
        due = one.backlog.next_due()
        assert due is not None
        assert 3000 < due - loop.time() < 3700


async def key_of(here: EngineHarness, run_id: int) -> str:
    ((key,),) = await here.sql("SELECT ordering_key FROM runs WHERE id = %s", run_id)
    return str(key)


async def notify(one: Claiming, name: str = "tick") -> None:
    """Add the queue of ordered runs to the backlog, as a notification does."""
    now = asyncio.get_running_loop().time()
    ((server_now,),) = await one.harness.sql("SELECT clock_timestamp()")
    one.clock.learn(server_now, now)
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    one.backlog.add(one.harness.catalogue.id_of(name), None, long_ago, now)


async def test_after_the_end_of_a_run_its_next_run_is_claimed_without_a_scan(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        for key in ("a", "b", "c"):
            await trigger_ordered(here, key, 2)
        one = await here.instance("one")
        assert len(await one.claim()) == 3
        cursor = one.backlog._queues[QueueKey(here.catalogue.id_of("tick"), None)].cursor
        assert isinstance(cursor, ScanCursor)
        assert await one.claim(everywhere=False) == [], "no queue is known to have a due run"
        (first,) = await here.sql("DELETE FROM runs WHERE ordering_key = 'b' AND state = 'running' RETURNING id")
        one.backlog.add_next_of(here.catalogue.id_of("tick"), "b")
        before = (cursor.after, cursor.start)
        (run,) = await one.claim(everywhere=False)
        assert run.run_id > first[0]
        assert await key_of(here, run.run_id) == "b"
        assert (cursor.after, cursor.start, cursor.asked) == (*before, {})


async def test_requested_keys_without_room_in_a_claim_are_read_by_the_next_claim(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        for key in ("a", "b", "c"):
            await trigger_ordered(here, key, 2)
        one = await here.instance("one")
        assert len(await one.claim()) == 3
        await one.claim(everywhere=False)
        await here.sql("DELETE FROM runs WHERE state = 'running' RETURNING 1")
        for key in ("a", "b", "c"):
            one.backlog.add_next_of(here.catalogue.id_of("tick"), key)
        assert len(await one.claim(room=2, everywhere=False)) == 2
        assert len(await one.claim(room=2, everywhere=False)) == 1
        assert not one.backlog.due(asyncio.get_running_loop().time())


async def test_a_key_that_is_both_requested_and_scanned_counts_once_against_the_limit(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        for key in ("a", "b", "x", "y"):
            await trigger_ordered(here, key, 2)
        one = await here.instance("one")
        assert len(await one.claim()) == 4
        await here.sql("DELETE FROM runs WHERE state = 'running' RETURNING 1")
        await notify(one)
        cursor = one.backlog._queues[QueueKey(here.catalogue.id_of("tick"), None)].cursor
        assert isinstance(cursor, ScanCursor)
        # All four keys are requested, and the rest of the round scans two of them.
        cursor.ask(["x", "y", "a", "b"])
        cursor.after, cursor.start, cursor.wrapped = "y", "b", False
        assert len(await one.claim(room=4, everywhere=False)) == 4


async def test_a_notification_during_a_scan_leads_to_a_scan_of_the_earlier_keys_too(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered, "MAX_KEYS", 2)
    monkeypatch.setattr(ordered, "PAUSE", 0.0)
    async with engine_harness(address, declare()) as here:
        later = datetime.now(UTC) + timedelta(hours=1)
        for key in ("b", "c", "d", "e"):
            await trigger_ordered(here, key, 1, run_at=later)
        one = await here.instance("one")
        await notify(one)
        real = ordered.claim_heads

        async def notify_during_the_scan(*given: Any, **options: Any) -> Any:
            await notify(one)
            found = await real(*given, **options)
            await trigger_ordered(here, "a", 1)
            return found

        monkeypatch.setattr(ordered, "claim_heads", notify_during_the_scan)
        assert await one.claim(everywhere=False) == []
        monkeypatch.setattr(ordered, "claim_heads", real)
        claimed = [run for _ in range(3) for run in await one.claim(everywhere=False)]
        assert [await key_of(here, run.run_id) for run in claimed] == ["a"]


async def test_ordered_and_other_runs_of_one_priority_are_claimed_in_turn(address: str) -> None:
    async with engine_harness(address, declare("tick"), declare("flood")) as here:
        await here.trigger(*[Order("flood")] * 100)
        for number in range(100):
            await trigger_ordered(here, f"line-{number}", 1)
        one = await here.instance("one")
        flood = here.catalogue.id_of("flood")
        seen = []
        for _ in range(4):
            claimed = ids(await one.claim(room=10))
            ((of_flood,),) = await here.sql(
                "SELECT count(*) FROM runs WHERE id = ANY (%s) AND action_id = %s", claimed, flood
            )
            seen.append((of_flood, len(claimed) - of_flood))
        assert sorted(seen) == [(0, 10), (0, 10), (10, 0), (10, 0)]


@pytest.mark.parametrize(("ordered_priority", "plain_priority"), [(5, 0), (0, 5)])
async def test_ordered_runs_are_claimed_at_the_priority_of_their_action(
    address: str, ordered_priority: int, plain_priority: int
) -> None:
    async with engine_harness(
        address, declare("tick", priority=ordered_priority), declare("flood", priority=plain_priority)
    ) as here:
        await here.trigger(*[Order("flood")] * 30)
        for number in range(30):
            await trigger_ordered(here, f"line-{number}", 1)
        one = await here.instance("one")
        first = ids(await one.claim(room=10)) + ids(await one.claim(room=10))
        ((ordered_count,),) = await here.sql(
            "SELECT count(*) FROM runs WHERE id = ANY (%s) AND ordering_key IS NOT NULL", first
        )
        assert ordered_count == (20 if ordered_priority > plain_priority else 0)


# -- limits and paused actions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"concurrency": 2}, {"concurrency": 1}, {"overlap": "queue"}])
async def test_concurrency_limits_ordered_and_other_runs_of_an_action_together(
    address: str, limit: dict[str, Any]
) -> None:
    limit_of_running = limit.get("concurrency", 1)
    async with engine_harness(address, declare(**limit)) as here:
        expected = [*await here.trigger(*[Order("tick", ordering_key=f"k{n % 5}") for n in range(20)])]
        expected += await here.trigger(*[Order("tick")] * 10)
        claiming = [await here.instance(f"i-{number}") for number in range(4)]
        ended: list[tuple[str | None, int]] = []
        while len(ended) < len(expected):
            await asyncio.gather(*(each.claim() for each in claiming))
            running = await here.sql("SELECT ordering_key, id FROM runs WHERE state = 'running'")
            # It is empty if each instance found only runs that another instance had locked.
            assert len(running) <= limit_of_running
            await here.sql(END, [run_id for _, run_id in running])
            ended += running
        for number in range(5):
            own = [run_id for key, run_id in ended if key == f"k{number}"]
            assert own == sorted(own)
        assert sorted(run_id for _, run_id in ended) == sorted(expected)


async def test_a_rate_limits_ordered_runs(address: str) -> None:
    async with engine_harness(address, declare(rate="20/s", burst=20)) as here:
        await here.trigger(*[Order("tick", ordering_key=f"k{number}") for number in range(200)])
        claiming = [await here.instance(f"i-{number}") for number in range(4)]
        loop = asyncio.get_running_loop()
        began, started = loop.time(), 0
        # At most 20 at once, and then 20 a second; fewer only if no instance claims for a long time.
        while started < 50:
            for share in await asyncio.gather(*(each.claim() for each in claiming)):
                started += len(share)
            assert started <= 20 + 20 * (loop.time() - began + RATE_TOLERANCE)


async def test_a_unique_violation_rolls_back_only_the_claim_of_its_own_action(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_harness(address, declare("tick", concurrency=9), declare("tock", concurrency=9)) as here:
        await here.trigger(Order("tick", ordering_key="a"), Order("tock", ordering_key="a"))
        one = await here.instance("one")
        real = ordered.claim_heads
        refused: list[int] = []

        async def refuse_one(connection: Any, *given: Any, **options: Any) -> Any:
            if not refused:
                refused.append(options["action"])
                await connection.execute("DO $$ BEGIN RAISE unique_violation; END $$")
            return await real(connection, *given, **options)

        monkeypatch.setattr(ordered, "claim_heads", refuse_one)
        assert len(await one.claim()) == 1
        assert await here.sql("SELECT count(*) FROM runs WHERE state = 'running'") == [(1,)]
        await asyncio.sleep(2 * ordered.RETRY)
        assert len(await one.claim(everywhere=False)) == 1


async def test_runs_claimed_of_one_action_are_kept_if_the_claim_of_another_fails(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_harness(address, declare("tick"), declare("tock")) as here:
        await here.trigger(Order("tick", ordering_key="a"), Order("tock", ordering_key="a"))
        one = await here.instance("one")
        real = ordered.claim_heads
        asked: list[int] = []

        async def fail_the_second(*given: Any, **options: Any) -> Any:
            asked.append(options["action"])
            if len(asked) == 2:
                raise psycopg.OperationalError("the connection is lost")
            return await real(*given, **options)

        monkeypatch.setattr(ordered, "claim_heads", fail_the_second)
        claimed = await one.claim()
        assert await here.sql("SELECT id FROM runs WHERE state = 'running'") == [(run.run_id,) for run in claimed]
        assert len(claimed) == 1


async def test_no_ordered_run_of_a_paused_action_is_claimed(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        await trigger_ordered(here, "a", 2)
        one = await here.instance("one")
        await here.sql("UPDATE actions SET paused_at = now() RETURNING 1")
        assert await one.claim() == []
        assert not one.backlog.due(asyncio.get_running_loop().time())
        await here.sql("UPDATE actions SET paused_at = NULL RETURNING 1")
        assert len(await one.claim()) == 1


@pytest.mark.parametrize("limit", ["concurrency = 1", "rate_interval = 3600, rate_burst = 1"])
async def test_a_limit_that_only_another_release_declares_applies_to_ordered_runs(address: str, limit: str) -> None:
    async with engine_harness(address, declare()) as here:
        await trigger_ordered(here, "a", 1)
        await trigger_ordered(here, "b", 1)
        one = await here.instance("one")
        await here.sql(f"UPDATE actions SET {limit} RETURNING 1")
        assert await one.claim() == [], "this instance has not read the limit yet"
        one.claimant.limited = {here.catalogue.id_of("tick")}
        assert len(await one.claim()) == 1
        assert await one.claim() == []


# -- the cost of a claim ----------------------------------------------------------------------------------------------


async def test_many_runs_with_one_ordering_key_do_not_make_claims_read_more(address: str) -> None:
    """Count the blocks that a claim reads: with other runs, with another key, and with the long key itself."""
    async with engine_harness(address, declare()) as here:
        await here.trigger(*[Order("tick")] * 10)
        await trigger_ordered(here, "b", 10)
        before = [await blocks(here, CLAIM), await blocks(here, CLAIM_ORDERED)]
        await here.trigger(*[Order("tick", ordering_key="a")] * 10_000)
        after = [await blocks(here, CLAIM), await blocks(here, CLAIM_ORDERED)]
        # The indexes are one level deeper, and there is one more key.
        assert after[0] <= before[0] + 20, (before, after)
        assert after[1] <= before[1] + 60, (before, after)


async def blocks(here: EngineHarness, statement: Statement) -> int:
    """Return the number of blocks that a claim reads, and roll the claim back."""
    one = await here.instance("counting")
    values: dict[str, Any] = {"me": one.identity.id, "name": "counting", "counted": False}
    action_id = here.catalogue.id_of("tick")
    if statement is CLAIM:
        values |= {"actions": array([action_id]), "priorities": "{0}", "floors": "{2020-01-01}", "mosts": "{5}"}
        values |= {"timeouts": "{60}", "room": 5, "passed": "{0}"}
    else:
        values |= {"action": action_id, "timeout": 60.0, "after": "", "wrapped": False, "start": "", "keys": ["a", "b"]}
        values |= {"looks": ordered.MAX_KEYS, "most": 100}
    async with here.database.connection() as connection:
        explain = b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + NAMESPACE.sql(statement)
        row = await (await connection.execute(explain, values)).fetchone()
        await connection.rollback()
    await here.sql("DELETE FROM instances RETURNING 1")
    assert row is not None
    plan = row[0][0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


async def test_a_claim_of_heads_uses_the_ordered_index_even_if_planned_on_an_empty_table(address: str) -> None:
    """The statement is planned once, when the table may be empty, and all plans have about the same cost."""
    async with engine_harness(address, declare()) as here:
        one, dedicated = await here.instance("one"), here.database.dedicated()
        with psycopg.connect(address, autocommit=True) as other:
            other.execute("VACUUM ANALYZE flotilla.runs")
        async with dedicated.connection() as connection:
            await claim_on(one, connection)
            known = await connection.execute(
                "SELECT name, cardinality(parameter_types) FROM pg_prepared_statements "
                "WHERE statement ~ 'RECURSIVE m[e]'"
            )
            ((name, count),) = await known.fetchall()
            explain = f"EXPLAIN (FORMAT JSON) EXECUTE {name} ({', '.join(['NULL'] * count)})"
            ((plan,),) = await (await connection.execute(explain, prepare=False)).fetchall()
        await dedicated.close()
        used = [scan.get("Index Name") for scan in scans(plan[0]["Plan"], "runs")]
        assert sorted(set(map(str, used))) == ["runs_ordered", "runs_ordered_running", "runs_pkey"], used


def scans(plan: dict[str, Any], relation: str) -> list[dict[str, Any]]:
    own = [plan] if plan.get("Relation Name") == relation and "Scan" in plan["Node Type"] else []
    return own + [scan for part in plan.get("Plans", []) for scan in scans(part, relation)]


# -- the order of the ids ---------------------------------------------------------------------------------------------


async def test_ids_follow_the_order_of_a_batch_with_and_without_idempotency_keys(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        keys = ["z", None, "b", "a", None, "y", "c", None]
        made = await here.trigger(*[Order("tick", key=key, ordering_key="l") for key in keys])
        assert made == sorted(made)
        rows = await here.sql("SELECT key FROM runs ORDER BY id")
        assert [key for (key,) in rows] == keys
        again = await here.trigger(*[Order("tick", key=key, ordering_key="l") for key in ("c", "new", "z")])
        assert (again[0], again[2]) == (made[6], made[0]), "runs that existed keep their ids"
        assert again[1] > made[-1]


async def test_a_retried_run_becomes_the_head_and_waits_for_the_running_run(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        failed, running, waiting = await trigger_ordered(here, "a", 3)
        one = await here.instance("one")
        assert ids(await one.claim()) == [failed]
        await end(here, failed, 1, "failed")
        assert ids(await one.claim()) == [running]
        async with here.database.connection() as connection:
            assert (await retry_run(connection, NAMESPACE, failed)).ordering_key == "a"
        (other,) = await trigger_ordered(here, "b", 1)
        assert ids(await one.claim()) == [other], "a run of another key is not delayed"
        await end(here, running, 1, None)
        assert ids(await one.claim()) == [failed]
        await end(here, failed, 2, None)
        assert ids(await one.claim()) == [waiting]


async def end(here: EngineHarness, run_id: int, token: int, state: str | None) -> None:
    values = {"ids": [run_id], "tokens": [token], "states": [state], "results": [None], "errors": [None]}
    async with here.database.connection() as connection:
        cursor = await connection.execute(NAMESPACE.sql(FINISH), values)
        assert cursor.rowcount == 1


async def test_an_invalid_ordering_key_is_refused_before_any_run_is_inserted(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        wrong: list[Any] = ["", "x" * 201, "a\nb", "a\x00b", 7]
        for ordering_key in wrong:
            with pytest.raises(EngineError, match="ordering_key must have from 1 to 200 printable characters"):
                await here.trigger(Order("tick"), Order("tick", ordering_key=ordering_key))
        assert await here.sql("SELECT id FROM runs") == []


@pytest.mark.parametrize("priority", [-1000, 0, 1000])
async def test_a_claim_by_priority_never_takes_an_ordered_run(address: str, priority: int) -> None:
    async with engine_harness(address, declare()) as here:
        await trigger_ordered(here, "a", 2, priority=priority)
        one, now = await here.instance("one"), asyncio.get_running_loop().time()
        one.backlog.add(here.catalogue.id_of("tick"), priority, datetime(2020, 1, 1, tzinfo=UTC), now)
        async with here.database.connection() as connection:
            assert await one.claimant.claim(connection, one.identity, one.backlog.due(now), 10, now) == []
