"""Runs of a line run one after another, in the order of their ids, whoever claims and whatever happens to one."""

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


async def line(here: EngineHarness, ordering_key: str, many: int, **order: Any) -> list[int]:
    return await here.trigger(*[Order("tick", ordering_key=ordering_key, **order)] * many)


# -- who may be claimed -----------------------------------------------------------------------------------------------


async def test_of_each_line_the_first_is_claimed_whoever_claims_and_the_next_when_it_has_ended(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        waiting = {key: await line(here, key, 4) for key in ("a", "b", "c")}
        claiming = [await here.instance(f"i-{number}") for number in range(4)]
        while any(waiting.values()):
            shares = await asyncio.gather(*(each.claim() for each in claiming))
            claimed = [run.run_id for share in shares for run in share]
            assert sorted(claimed) == sorted(left[0] for left in waiting.values() if left)
            await here.sql(END, claimed)
            waiting = {key: left[1:] for key, left in waiting.items()}


async def test_two_actions_with_the_same_key_have_nothing_to_do_with_each_other(address: str) -> None:
    async with engine_harness(address, declare("tick"), declare("tock")) as here:
        first, _, other = await here.trigger(*[Order(name, ordering_key="a") for name in ("tick", "tick", "tock")])
        assert ids(await (await here.instance("one")).claim()) == [first, other]


async def test_a_greater_priority_overtakes_nobody_in_its_line(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        first, _ = await here.trigger(
            Order("tick", ordering_key="a", priority=-5), Order("tick", ordering_key="a", priority=9)
        )
        assert await (await here.instance("one")).claim() == [Claimed(first, 1, -5)], "and is what it was given"


@pytest.mark.parametrize(
    "held",
    [
        "UPDATE runs SET run_at = now() + interval '1 h' WHERE id = %s RETURNING 1",
        "UPDATE runs SET attempt = 1, run_at = now() + interval '1 h', error = 'torn' WHERE id = %s RETURNING 1",
    ],
    ids=["for-later", "waits-for-its-retry"],
)
async def test_a_head_that_waits_for_its_time_holds_its_line_and_the_time_is_known(address: str, held: str) -> None:
    async with engine_harness(address, declare()) as here:
        first, *_ = await line(here, "a", 3)
        (other,) = await line(here, "b", 1)
        await here.sql(held, first)
        one = await here.instance("one")
        assert ids(await one.claim()) == [other]
        due = one.backlog.next_due()
        assert due is not None
        assert 3500 < due - asyncio.get_running_loop().time() < 3700
        await here.sql("UPDATE runs SET run_at = now() WHERE id = %s RETURNING 1", first)
        assert ids(await one.claim()) == [first]


async def test_a_run_of_an_instance_that_died_holds_its_line_and_goes_first(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        first, second = await line(here, "a", 2)
        one, two = await here.instance("one"), await here.instance("two")
        assert ids(await one.claim()) == [first]
        assert await two.claim() == []
        register = Registry(NAMESPACE, [Rescue(NAMESPACE)])
        with psycopg.connect(address, autocommit=True) as leader:
            assert register.declare_gone(leader, one.identity.id, "it looks dead") == "one"
        assert ids(await two.claim()) == [first]
        await here.sql(END, [first])
        assert ids(await two.claim()) == [second]


async def test_whoever_was_declared_gone_claims_no_head(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        await line(here, "a", 1)
        one = await here.instance("one")
        await here.sql("UPDATE instances SET state = 'gone' RETURNING 1")
        assert await one.claim() == []


async def test_a_locked_head_is_left_alone_with_its_line(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        first, _ = await line(here, "a", 2)
        one = await here.instance("one")
        with psycopg.connect(address) as holder:
            holder.execute("SELECT 1 FROM flotilla.runs WHERE id = %s FOR UPDATE", [first])
            assert await one.claim() == []
        assert ids(await one.claim()) == [first]


# -- two that were open at the same time ------------------------------------------------------------------------------

INSERT = """
INSERT INTO flotilla.runs (action_id, priority, run_at, max_attempts, trigger, ordering_key)
VALUES (%s, %s, now(), 1, 'code', 'a')
RETURNING id
"""


def insert(session: psycopg.Connection[TupleRow], here: EngineHarness) -> int:
    row = session.execute(INSERT, [here.catalogue.id_of("tick"), 0]).fetchone()
    assert row is not None
    return int(row[0])


async def test_one_that_becomes_visible_late_waits_for_the_later_one_that_runs_and_goes_before_the_rest(
    address: str,
) -> None:
    async with engine_harness(address, declare()) as here:
        one, two = await here.instance("one"), await here.instance("two")
        with psycopg.connect(address) as slow:
            early = insert(slow, here)
            later, last = await line(here, "a", 2)
            assert ids(await one.claim()) == [later]
        assert early < later
        assert await two.claim() == await one.claim() == []
        await here.sql(END, [later])
        assert ids(await two.claim()) == [early]
        await here.sql(END, [early])
        assert ids(await two.claim()) == [last]


async def test_two_claims_that_saw_different_heads_do_not_both_take_one(address: str) -> None:
    """Interleaved by hand: the first has taken its head and not committed when the second sees an earlier one."""
    async with engine_harness(address, declare()) as here:
        one, two = await here.instance("one"), await here.instance("two")
        slow = psycopg.connect(address)
        early = insert(slow, here)
        (later,) = await line(here, "a", 1)
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
        assert due - asyncio.get_running_loop().time() < 1, "it looks again soon"
        await here.sql(END, [later])
        assert ids(await two.claim()) == [early]


async def claim_on(one: Claiming, connection: Any) -> list[Claimed]:
    now = asyncio.get_running_loop().time()
    one.backlog.add(one.harness.catalogue.id_of("tick"), None, datetime(2020, 1, 1, tzinfo=UTC), now)
    rows = await one.claimant.claim(connection, one.identity, one.backlog.due(now), 10, now)
    return [Claimed(row[0], row[2], row[6]) for row in rows]


async def test_the_index_refuses_a_second_one_that_runs(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        await line(here, "a", 2)
        with pytest.raises(psycopg.errors.UniqueViolation):
            await here.sql("UPDATE runs SET state = 'running'")


# -- in which order lines are looked at -------------------------------------------------------------------------------


async def test_lines_take_turns(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        for key in ("a", "b", "c"):
            await line(here, key, 3)
        one, turns = await here.instance("one"), []
        for _ in range(9):
            ((run_id, _, _),) = await one.claim(room=1)
            turns += [key for (key,) in await here.sql("DELETE FROM runs WHERE id = %s RETURNING ordering_key", run_id)]
            # It would go on with this line at once, were there not others whose turn it is.
            one.backlog.add_next_of(here.catalogue.id_of("tick"), turns[-1])
        assert turns == ["a", "b", "c"] * 3


async def test_more_lines_than_one_claim_looks_at_are_all_come_to(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered, "MAX_KEYS", 3)
    monkeypatch.setattr(ordered, "PAUSE", 0.0)
    async with engine_harness(address, declare()) as here:
        for number in range(10):
            await line(here, f"line-{number}", 1)
        await here.sql("UPDATE runs SET run_at = now() + interval '1 h' WHERE ordering_key <> 'line-7' RETURNING 1")
        one, claims = await here.instance("one"), 0
        await told(one)
        while one.backlog.due(asyncio.get_running_loop().time()):
            claims += 1
            for run in await one.claim(everywhere=False):
                assert (claims, await key_of(here, run.run_id)) == (3, "line-7")
        assert claims == 4
        due = one.backlog.next_due()
        assert due is not None
        assert due - asyncio.get_running_loop().time() > 3500, "the others are for later, and that is known"


async def test_after_many_lines_a_look_rests_and_lines_that_are_asked_for_do_not_wait_for_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered, "PAUSE", 3600.0)
    async with engine_harness(address, declare()) as here:
        (first,) = await line(here, "a", 1)
        await line(here, "b", 2)
        one, loop = await here.instance("one"), asyncio.get_running_loop()
        await here.sql("UPDATE runs SET run_at = now() + interval '1 h' WHERE id = %s RETURNING 1", first)
        await told(one)
        (run,) = await one.claim(everywhere=False)
        await told(one)
        assert one.backlog.due(loop.time()) == []
        due = one.backlog.next_due()
        assert due is not None
        assert 1 < due - loop.time() < 10, "two lines of a thousand"
        await here.sql(END, [run.run_id])
        one.backlog.add_next_of(here.catalogue.id_of("tick"), "b")
        assert len(await one.claim(everywhere=False)) == 1


async def test_a_look_that_has_not_come_round_rests_too(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "MAX_KEYS", 1)
    monkeypatch.setattr(ordered, "PAUSE", 3600.0)
    async with engine_harness(address, declare()) as here:
        later = datetime.now(UTC) + timedelta(days=1)
        for key in ("a", "b"):
            await line(here, key, 1, run_at=later)
        one, loop = await here.instance("one"), asyncio.get_running_loop()
        await told(one)
        assert await one.claim(everywhere=False) == []
        await told(one)
        assert one.backlog.due(loop.time()) == []
        due = one.backlog.next_due()
        assert due is not None
        assert 3000 < due - loop.time() < 3700


async def key_of(here: EngineHarness, run_id: int) -> str:
    ((key,),) = await here.sql("SELECT ordering_key FROM runs WHERE id = %s", run_id)
    return str(key)


async def told(one: Claiming, name: str = "tick") -> None:
    """Tell of a run in some line, as a notification does."""
    now = asyncio.get_running_loop().time()
    ((server_now,),) = await one.harness.sql("SELECT clock_timestamp()")
    one.clock.learn(server_now, now)
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    one.backlog.add(one.harness.catalogue.id_of(name), None, long_ago, now)


async def test_where_a_run_has_ended_the_next_of_its_line_is_found_without_a_look_at_the_others(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        for key in ("a", "b", "c"):
            await line(here, key, 2)
        one = await here.instance("one")
        assert len(await one.claim()) == 3
        ring = one.backlog._queues[QueueKey(here.catalogue.id_of("tick"), None)].cursor
        assert isinstance(ring, ScanCursor)
        assert await one.claim(everywhere=False) == [], "nobody is told of anything"
        (first,) = await here.sql("DELETE FROM runs WHERE ordering_key = 'b' AND state = 'running' RETURNING id")
        one.backlog.add_next_of(here.catalogue.id_of("tick"), "b")
        before = (ring.after, ring.start)
        (run,) = await one.claim(everywhere=False)
        assert run.run_id > first[0]
        assert await key_of(here, run.run_id) == "b"
        assert (ring.after, ring.start, ring.asked) == (*before, {})


async def test_lines_that_there_was_no_room_for_are_asked_for_again(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        for key in ("a", "b", "c"):
            await line(here, key, 2)
        one = await here.instance("one")
        assert len(await one.claim()) == 3
        await one.claim(everywhere=False)
        await here.sql("DELETE FROM runs WHERE state = 'running' RETURNING 1")
        for key in ("a", "b", "c"):
            one.backlog.add_next_of(here.catalogue.id_of("tick"), key)
        assert len(await one.claim(room=2, everywhere=False)) == 2
        assert len(await one.claim(room=2, everywhere=False)) == 1
        assert not one.backlog.due(asyncio.get_running_loop().time())


async def test_a_line_that_is_asked_for_and_come_past_takes_nobodys_room(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        for key in ("a", "b", "x", "y"):
            await line(here, key, 2)
        one = await here.instance("one")
        assert len(await one.claim()) == 4
        await here.sql("DELETE FROM runs WHERE state = 'running' RETURNING 1")
        await told(one)
        ring = one.backlog._queues[QueueKey(here.catalogue.id_of("tick"), None)].cursor
        assert isinstance(ring, ScanCursor)
        # All are asked for, and of what is left of the round, two are met.
        ring.ask(["x", "y", "a", "b"])
        ring.after, ring.start, ring.wrapped = "y", "b", False
        assert len(await one.claim(room=4, everywhere=False)) == 4


async def test_what_is_told_while_lines_are_looked_at_is_found_also_behind_what_that_look_has_come_past(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered, "MAX_KEYS", 2)
    monkeypatch.setattr(ordered, "PAUSE", 0.0)
    async with engine_harness(address, declare()) as here:
        later = datetime.now(UTC) + timedelta(hours=1)
        for key in ("b", "c", "d", "e"):
            await line(here, key, 1, run_at=later)
        one = await here.instance("one")
        await told(one)
        real = ordered.claim_heads

        async def while_it_looks(*given: Any, **wanted: Any) -> Any:
            await told(one)
            found = await real(*given, **wanted)
            await line(here, "a", 1)
            return found

        monkeypatch.setattr(ordered, "claim_heads", while_it_looks)
        assert await one.claim(everywhere=False) == []
        monkeypatch.setattr(ordered, "claim_heads", real)
        claimed = [run for _ in range(3) for run in await one.claim(everywhere=False)]
        assert [await key_of(here, run.run_id) for run in claimed] == ["a"]


async def test_lines_and_other_runs_of_one_priority_claim_in_turn(address: str) -> None:
    async with engine_harness(address, declare("tick"), declare("flood")) as here:
        await here.trigger(*[Order("flood")] * 100)
        for number in range(100):
            await line(here, f"line-{number}", 1)
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


@pytest.mark.parametrize(("lined", "plain"), [(5, 0), (0, 5)])
async def test_lines_are_claimed_at_the_priority_of_their_action(address: str, lined: int, plain: int) -> None:
    async with engine_harness(address, declare("tick", priority=lined), declare("flood", priority=plain)) as here:
        await here.trigger(*[Order("flood")] * 30)
        for number in range(30):
            await line(here, f"line-{number}", 1)
        one = await here.instance("one")
        first = ids(await one.claim(room=10)) + ids(await one.claim(room=10))
        ((of_lines,),) = await here.sql(
            "SELECT count(*) FROM runs WHERE id = ANY (%s) AND ordering_key IS NOT NULL", first
        )
        assert of_lines == (20 if lined > plain else 0)


# -- limits, and pauses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"concurrency": 2}, {"concurrency": 1}, {"overlap": "queue"}])
async def test_concurrency_holds_for_lines_and_the_rest_together(address: str, limit: dict[str, Any]) -> None:
    most = limit.get("concurrency", 1)
    async with engine_harness(address, declare(**limit)) as here:
        wanted = [*await here.trigger(*[Order("tick", ordering_key=f"k{n % 5}") for n in range(20)])]
        wanted += await here.trigger(*[Order("tick")] * 10)
        claiming = [await here.instance(f"i-{number}") for number in range(4)]
        ended: list[tuple[str | None, int]] = []
        while len(ended) < len(wanted):
            await asyncio.gather(*(each.claim() for each in claiming))
            running = await here.sql("SELECT ordering_key, id FROM runs WHERE state = 'running'")
            # None, where each of them found what another was about to claim.
            assert len(running) <= most
            await here.sql(END, [run_id for _, run_id in running])
            ended += running
        for number in range(5):
            own = [run_id for key, run_id in ended if key == f"k{number}"]
            assert own == sorted(own)
        assert sorted(run_id for _, run_id in ended) == sorted(wanted)


async def test_a_rate_holds_for_lines(address: str) -> None:
    async with engine_harness(address, declare(rate="20/s", burst=20)) as here:
        await here.trigger(*[Order("tick", ordering_key=f"k{number}") for number in range(200)])
        claiming = [await here.instance(f"i-{number}") for number in range(4)]
        loop = asyncio.get_running_loop()
        began, started = loop.time(), 0
        # 20 at once, and then 20 a second, and no more; fewer only where nobody claims for long.
        while started < 50:
            for share in await asyncio.gather(*(each.claim() for each in claiming)):
                started += len(share)
            assert started <= 20 + 20 * (loop.time() - began + RATE_TOLERANCE)


async def test_a_refused_head_takes_nothing_back_that_was_claimed_under_the_same_limit(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_harness(address, declare("tick", concurrency=9), declare("tock", concurrency=9)) as here:
        await here.trigger(Order("tick", ordering_key="a"), Order("tock", ordering_key="a"))
        one = await here.instance("one")
        real = ordered.claim_heads
        refused: list[int] = []

        async def refuse_one(connection: Any, *given: Any, **wanted: Any) -> Any:
            if not refused:
                refused.append(wanted["action"])
                await connection.execute("DO $$ BEGIN RAISE unique_violation; END $$")
            return await real(connection, *given, **wanted)

        monkeypatch.setattr(ordered, "claim_heads", refuse_one)
        assert len(await one.claim()) == 1
        assert await here.sql("SELECT count(*) FROM runs WHERE state = 'running'") == [(1,)]
        await asyncio.sleep(2 * ordered.RETRY)
        assert len(await one.claim(everywhere=False)) == 1


async def test_what_was_taken_of_one_action_is_kept_if_the_claim_of_another_fails(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_harness(address, declare("tick"), declare("tock")) as here:
        await here.trigger(Order("tick", ordering_key="a"), Order("tock", ordering_key="a"))
        one = await here.instance("one")
        real = ordered.claim_heads
        asked: list[int] = []

        async def fail_the_second(*given: Any, **wanted: Any) -> Any:
            asked.append(wanted["action"])
            if len(asked) == 2:
                raise psycopg.OperationalError("the connection is lost")
            return await real(*given, **wanted)

        monkeypatch.setattr(ordered, "claim_heads", fail_the_second)
        claimed = await one.claim()
        assert await here.sql("SELECT id FROM runs WHERE state = 'running'") == [(run.run_id,) for run in claimed]
        assert len(claimed) == 1


async def test_a_paused_action_has_none_of_its_lines_claimed(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        await line(here, "a", 2)
        one = await here.instance("one")
        await here.sql("UPDATE actions SET paused_at = now() RETURNING 1")
        assert await one.claim() == []
        assert not one.backlog.due(asyncio.get_running_loop().time())
        await here.sql("UPDATE actions SET paused_at = NULL RETURNING 1")
        assert len(await one.claim()) == 1


@pytest.mark.parametrize("limit", ["concurrency = 1", "rate_interval = 3600, rate_burst = 1"])
async def test_a_limit_that_another_release_has_brought_is_kept_for_lines_too(address: str, limit: str) -> None:
    async with engine_harness(address, declare()) as here:
        await line(here, "a", 1)
        await line(here, "b", 1)
        one = await here.instance("one")
        await here.sql(f"UPDATE actions SET {limit} RETURNING 1")
        assert await one.claim() == [], "as long as nobody has told it"
        one.claimant.limited = {here.catalogue.id_of("tick")}
        assert len(await one.claim()) == 1
        assert await one.claim() == []


# -- what it costs ----------------------------------------------------------------------------------------------------


async def test_a_long_line_costs_nobody_anything(address: str) -> None:
    """By the blocks that a claim touches: of other runs, of other lines, and of the long line itself."""
    async with engine_harness(address, declare()) as here:
        await here.trigger(*[Order("tick")] * 10)
        await line(here, "b", 10)
        before = [await blocks(here, CLAIM), await blocks(here, CLAIM_ORDERED)]
        await here.trigger(*[Order("tick", ordering_key="a")] * 10_000)
        after = [await blocks(here, CLAIM), await blocks(here, CLAIM_ORDERED)]
        # The indexes are a level deeper, and there is a line more.
        assert after[0] <= before[0] + 20, (before, after)
        assert after[1] <= before[1] + 60, (before, after)


async def blocks(here: EngineHarness, statement: Statement) -> int:
    """Count what a claim touches, and take it back."""
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


async def test_a_claim_of_heads_goes_by_the_lines_even_if_it_was_planned_on_an_empty_table(address: str) -> None:
    """The statement is planned once, when the table may be empty, and any way through it looks as good as another."""
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
            ((name, many),) = await known.fetchall()
            explain = f"EXPLAIN (FORMAT JSON) EXECUTE {name} ({', '.join(['NULL'] * many)})"
            ((plan,),) = await (await connection.execute(explain, prepare=False)).fetchall()
        await dedicated.close()
        used = [scan.get("Index Name") for scan in scans(plan[0]["Plan"], "runs")]
        assert sorted(set(map(str, used))) == ["runs_ordered", "runs_ordered_running", "runs_pkey"], used


def scans(plan: dict[str, Any], relation: str) -> list[dict[str, Any]]:
    own = [plan] if plan.get("Relation Name") == relation and "Scan" in plan["Node Type"] else []
    return own + [scan for part in plan.get("Plans", []) for scan in scans(part, relation)]


# -- how they are ordered ---------------------------------------------------------------------------------------------


async def test_ids_go_by_the_place_in_a_batch_whatever_keys_there_are(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        keys = ["z", None, "b", "a", None, "y", "c", None]
        made = await here.trigger(*[Order("tick", key=key, ordering_key="l") for key in keys])
        assert made == sorted(made)
        rows = await here.sql("SELECT key FROM runs ORDER BY id")
        assert [key for (key,) in rows] == keys
        again = await here.trigger(*[Order("tick", key=key, ordering_key="l") for key in ("c", "new", "z")])
        assert (again[0], again[2]) == (made[6], made[0]), "those that were there keep their places"
        assert again[1] > made[-1]


async def test_a_run_that_is_tried_again_goes_to_the_front_and_never_beside_one_that_runs(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        failed, running, waiting = await line(here, "a", 3)
        one = await here.instance("one")
        assert ids(await one.claim()) == [failed]
        await end(here, failed, 1, "failed")
        assert ids(await one.claim()) == [running]
        async with here.database.connection() as connection:
            assert (await retry_run(connection, NAMESPACE, failed)).ordering_key == "a"
        (other,) = await line(here, "b", 1)
        assert ids(await one.claim()) == [other], "and who is in no line with it does not notice"
        await end(here, running, 1, None)
        assert ids(await one.claim()) == [failed]
        await end(here, failed, 2, None)
        assert ids(await one.claim()) == [waiting]


async def end(here: EngineHarness, run_id: int, token: int, state: str | None) -> None:
    values = {"ids": [run_id], "tokens": [token], "states": [state], "results": [None], "errors": [None]}
    async with here.database.connection() as connection:
        cursor = await connection.execute(NAMESPACE.sql(FINISH), values)
        assert cursor.rowcount == 1


async def test_what_is_no_key_is_refused_before_anything_is_written(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        wrong: list[Any] = ["", "x" * 201, "a\nb", "a\x00b", 7]
        for ordering_key in wrong:
            with pytest.raises(EngineError, match="ordering_key must have from 1 to 200 printable characters"):
                await here.trigger(Order("tick"), Order("tick", ordering_key=ordering_key))
        assert await here.sql("SELECT id FROM runs") == []


@pytest.mark.parametrize("priority", [-1000, 0, 1000])
async def test_a_claim_by_priority_never_takes_an_ordered_run(address: str, priority: int) -> None:
    async with engine_harness(address, declare()) as here:
        await line(here, "a", 2, priority=priority)
        one, now = await here.instance("one"), asyncio.get_running_loop().time()
        one.backlog.add(here.catalogue.id_of("tick"), priority, datetime(2020, 1, 1, tzinfo=UTC), now)
        async with here.database.connection() as connection:
            assert await one.claimant.claim(connection, one.identity, one.backlog.due(now), 10, now) == []
