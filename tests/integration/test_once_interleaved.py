"""Which block gets a key: two at the same time, after a dead owner, and with a late owner.

The statements are interleaved by hand, with one session for each owner.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from app.fleet.cluster.registry import Registry
from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.db.pool.statements import fetch
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.execute.attempt import Attempt
from app.fleet.engine.maintenance.pruner import LONG_AGO
from app.fleet.engine.maintenance.rescuer import Rescue
from app.fleet.engine.once.block import Block, Owner
from app.fleet.engine.once.housekeeping import pending_too_long, prune_keys
from app.fleet.engine.once.statements import DRAW_TOKEN, MARK, RELEASE, TAKE
from tests.support.engine_harness import NAMESPACE, EngineHarness, declare, engine_harness
from tests.support.postgres import Postgres
from tests.support.runs import soon

pytestmark = pytest.mark.anyio
POSTGRES_VERSIONS = (18, 16)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def prepared(postgres: Postgres) -> AsyncIterator[EngineHarness]:
    """One database for all tests of this module."""
    address = postgres.new_database()
    async with engine_harness(address, declare()) as own:
        yield own
    postgres.drop(address)


@pytest.fixture
async def here(prepared: EngineHarness) -> EngineHarness:
    await prepared.sql("TRUNCATE once_keys, runs, instances")
    return prepared


@dataclass
class Taker:
    """An owner that takes keys, marks them and releases them, on its own session."""

    owner: Owner
    session: Connection

    async def ask(self, *keys: str) -> Block:
        block = Block(self.owner, "s", list(keys), 3600.0)
        ((block.token,),) = await fetch(self.session, NAMESPACE.sql(DRAW_TOKEN))
        states = dict(await fetch(self.session, NAMESPACE.sql(TAKE), block.values))
        if None not in states:
            raise PermissionError
        block.set_states(states)
        return block

    async def mark(self, block: Block) -> bool:
        ((marked,),) = await fetch(self.session, NAMESPACE.sql(MARK), block.values)
        return bool(marked == len(block.keys))

    async def release(self, block: Block) -> None:
        await self.session.execute(NAMESPACE.sql(RELEASE), block.values)


@asynccontextmanager
async def taker(here: EngineHarness, owner: Owner) -> AsyncIterator[Taker]:
    async with await psycopg.AsyncConnection.connect(here.address, autocommit=True) as session:
        yield Taker(owner, session)


async def instance(here: EngineHarness, name: str) -> Owner:
    return Owner((await here.instance(name)).identity.id, None)


async def attempt(here: EngineHarness, name: str = "runs") -> Owner:
    """A running attempt on a new instance."""
    await here.trigger(Order("tick"))
    one = await here.instance(name)
    (claimed,) = await one.claim(room=1)
    attempt = SimpleNamespace(run_id=claimed.run_id, token=claimed.token, number=1, committed=False)
    return Owner(one.identity.id, cast("Attempt", attempt))


async def wait_until_blocked(here: EngineHarness, session: Connection) -> None:
    """Wait until this session waits for a lock."""
    blocked = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    await soon(lambda: here.sql(blocked, session.info.backend_pid))


async def declare_gone(here: EngineHarness, owner: Owner) -> None:
    """Declare the instance of an owner gone, as the leader does."""
    register = Registry(NAMESPACE, [Rescue(NAMESPACE)])
    with psycopg.connect(here.address, autocommit=True) as leader:
        assert register.declare_gone(leader, owner.instance, "it looks dead") is not None


# -- at the same time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["new", "free", "expired", "dead"])
async def test_of_two_blocks_that_take_a_key_at_the_same_time_one_gets_it(here: EngineHarness, before: str) -> None:
    async with taker(here, await instance(here, "one")) as one, taker(here, await attempt(here)) as two:
        await prepare(here, before)
        async with one.session.transaction():
            first = await one.ask("k")
            taking = asyncio.create_task(two.ask("k"))
            await wait_until_blocked(here, two.session)
        second = await taking
    assert (first.states, second.states) == ({"k": "new"}, {"k": "pending"})


async def prepare(here: EngineHarness, state: str) -> None:
    """Prepare a key that exists and has no owner, in one of the ways in which that can happen."""
    if state == "new":
        return
    async with taker(here, await instance(here, "former")) as former:
        block = await former.ask("k")
        if state == "free":
            await former.release(block)
        elif state == "expired":
            await former.mark(block)
            await here.sql("UPDATE once_keys SET expires_at = now() - interval '1 s'")
        else:
            await declare_gone(here, former.owner)


async def test_if_the_first_block_rolls_back_the_second_gets_the_key(here: EngineHarness) -> None:
    async with taker(here, await instance(here, "one")) as one, taker(here, await instance(here, "two")) as two:
        async with one.session.transaction(force_rollback=True):
            await one.ask("k")
            taking = asyncio.create_task(two.ask("k"))
            await wait_until_blocked(here, two.session)
        assert (await taking).states == {"k": "new"}


async def test_ten_blocks_that_take_the_same_keys_get_disjoint_sets_of_them(here: EngineHarness) -> None:
    keys = [f"k-{number}" for number in range(100)]
    async with taker(here, await instance(here, "one")) as one:
        sessions = [await psycopg.AsyncConnection.connect(here.address, autocommit=True) for _ in range(10)]
        blocks = await asyncio.gather(*(Taker(one.owner, session).ask(*keys) for session in sessions))
        for session in sessions:
            await session.close()
    assert sorted(key for block in blocks for key in block.keys) == sorted(keys)


@pytest.mark.parametrize("before", ["new", "free"])
@pytest.mark.parametrize("kind", [attempt, instance])
async def test_an_owner_that_is_newer_than_the_statement_keeps_its_key(
    here: EngineHarness, kind: Any, before: str
) -> None:
    """The statement has begun and waits for another key, while its snapshot of this key becomes out of date."""
    await prepare(here, before)
    async with (
        taker(here, await instance(here, "holder")) as holder,
        taker(here, await instance(here, "asks")) as second,
    ):
        async with holder.session.transaction(force_rollback=True):
            await holder.ask("a")
            taking = asyncio.create_task(second.ask("a", "k"))
            await wait_until_blocked(here, second.session)
            # Neither the run or instance nor its key existed when the statement began.
            async with taker(here, await kind(here, "young")) as young:
                assert (await young.ask("k")).states == {"k": "new"}
        assert (await taking).states == {"a": "new", "k": "pending"}


async def test_a_key_that_its_gone_owner_is_marking_is_not_taken(
    here: EngineHarness,
) -> None:
    """The owner is gone when the statement begins, but the transaction that marks the key is still open."""
    async with taker(here, await instance(here, "late")) as late, taker(here, await instance(here, "asks")) as second:
        block = await late.ask("k")
        async with late.session.transaction():
            assert await late.mark(block)
            await declare_gone(here, late.owner)
            taking = asyncio.create_task(second.ask("k"))
            await wait_until_blocked(here, second.session)
        assert (await taking).keys == []
        assert (await second.ask("k")).states == {"k": "seen"}


async def test_batches_that_take_keys_in_opposite_orders_do_not_deadlock(here: EngineHarness) -> None:
    keys = [f"k-{number}" for number in range(300)]

    async def take_and_end(one: Taker, mine: list[str]) -> None:
        for number in range(20):
            block = await one.ask(*mine)
            # A seen key expires at once, so that there is a key to take each time.
            block.keep = 0.0
            await (one.mark(block) if number % 2 else one.release(block))

    owner = await instance(here, "one")
    async with taker(here, owner) as one, taker(here, owner) as two, taker(here, owner) as three:
        await asyncio.gather(
            take_and_end(one, keys), take_and_end(two, keys[::-1]), take_and_end(three, keys[150:] + keys[:150])
        )


# -- owners that have ended -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [attempt, instance])
async def test_a_pending_key_becomes_free_as_soon_as_its_owner_is_gone(here: EngineHarness, kind: Any) -> None:
    async with taker(here, await kind(here, "owner")) as owner, taker(here, await instance(here, "asks")) as second:
        await owner.ask("k")
        assert (await second.ask("k")).states == {"k": "pending"}
        await declare_gone(here, owner.owner)
        assert (await second.ask("k")).states == {"k": "new"}


@pytest.mark.parametrize(
    "what", ["UPDATE runs SET state = 'pending'", "UPDATE runs SET token = token + 1", "DELETE FROM runs"]
)
async def test_a_key_of_an_ended_attempt_is_free_whatever_follows_the_attempt(here: EngineHarness, what: str) -> None:
    async with taker(here, await attempt(here)) as owner, taker(here, await instance(here, "asks")) as second:
        await owner.ask("k")
        await here.sql(what)
        assert (await second.ask("k")).states == {"k": "new"}


async def test_an_instance_that_was_declared_gone_takes_no_key(here: EngineHarness) -> None:
    async with taker(here, await instance(here, "gone")) as gone:
        await declare_gone(here, gone.owner)
        with pytest.raises(PermissionError):
            await gone.ask("k")
    assert await here.sql("SELECT 1 FROM once_keys") == []


async def test_an_attempt_whose_run_was_taken_over_takes_no_key(here: EngineHarness) -> None:
    async with taker(here, await attempt(here)) as late:
        await here.sql("UPDATE runs SET token = token + 1")
        with pytest.raises(PermissionError):
            await late.ask("k")
    assert await here.sql("SELECT 1 FROM once_keys") == []


async def test_an_instance_is_not_declared_gone_while_it_takes_a_key(here: EngineHarness) -> None:
    register = Registry(NAMESPACE, [Rescue(NAMESPACE)])
    async with taker(here, await instance(here, "one")) as one:
        async with one.session.transaction():
            await one.ask("k")
            with psycopg.connect(here.address, autocommit=True) as leader:
                assert register.declare_gone(leader, one.owner.instance, "it looks dead") is None
        await declare_gone(here, one.owner)


# -- late owners ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [attempt, instance])
async def test_an_owner_whose_key_was_taken_by_another_cannot_mark_or_release_it(
    here: EngineHarness, kind: Any
) -> None:
    async with taker(here, await kind(here, "late")) as late, taker(here, await instance(here, "next")) as following:
        block = await late.ask("k")
        await declare_gone(here, late.owner)
        assert (await following.ask("k")).states == {"k": "new"}
        assert not await late.mark(block)
        await late.release(block)
        assert await here.sql("SELECT state, instance_id FROM once_keys") == [("pending", following.owner.instance)]


async def test_a_living_owner_cannot_mark_a_key_with_another_token(here: EngineHarness) -> None:
    async with taker(here, await instance(here, "one")) as one:
        block = await one.ask("k")
        await here.sql("UPDATE once_keys SET token = token + 1")
        assert not await one.mark(block)
        await one.release(block)
    assert await here.sql("SELECT state FROM once_keys") == [("pending",)]


@pytest.mark.parametrize("kind", [attempt, instance])
async def test_an_ended_owner_cannot_mark_its_key_even_if_no_other_has_taken_it(here: EngineHarness, kind: Any) -> None:
    async with taker(here, await kind(here, "late")) as late:
        block = await late.ask("k")
        await declare_gone(here, late.owner)
        assert not await late.mark(block)


async def test_a_batch_is_marked_as_seen_completely_or_not_at_all(here: EngineHarness) -> None:
    async with taker(here, await instance(here, "one")) as one:
        block = await one.ask("a", "b", "c")
        await here.sql("UPDATE once_keys SET token = token + 1 WHERE key = 'b'")
        assert not await one.mark(block)
    assert await here.sql("SELECT DISTINCT state FROM once_keys") == [("pending",)]


async def test_a_run_is_not_rescued_while_its_attempt_marks_a_key(here: EngineHarness) -> None:
    async with taker(here, await attempt(here)) as one:
        block = await one.ask("k")
        async with one.session.transaction():
            assert await one.mark(block)
            with psycopg.connect(here.address, autocommit=True) as death:
                Rescue(NAMESPACE)(death, [one.owner.instance])
            assert await here.sql("SELECT state FROM runs") == [("running",)]


async def test_a_block_with_an_older_token_does_not_take_a_key_after_a_newer_one(here: EngineHarness) -> None:
    async with taker(here, await instance(here, "one")) as one:
        early = Block(one.owner, "s", ["k"], 3600.0)
        ((early.token,),) = await fetch(one.session, NAMESPACE.sql(DRAW_TOKEN))
        await one.release(await one.ask("k"))
        states = dict(await fetch(one.session, NAMESPACE.sql(TAKE), early.values))
        assert "k" not in states


@pytest.mark.parametrize("statement", [TAKE, MARK, RELEASE])
async def test_keys_are_found_by_the_primary_key_alone(here: EngineHarness, statement: Statement) -> None:
    """Few of the rows are pending, and the batch is so large that a scan of all rows looks cheap to the planner."""
    owner = await instance(here, "one")
    await here.sql(
        """
        INSERT INTO once_keys (scope, key, token, state, instance_id, taken_at, expires_at)
        SELECT 's', 'k-' || n, 1, 'seen', 1, now(), now() FROM generate_series(1, 20000) AS n
        """
    )
    await here.sql("ANALYZE once_keys")
    block = Block(owner, "s", [f"k-{number}" for number in range(1000)], 3600.0, token=7)
    async with here.database.connection() as connection:
        explain = b"EXPLAIN (FORMAT JSON) " + NAMESPACE.sql(statement)
        ((plan,),) = await fetch(connection, explain, block.values)
    assert set(access_paths(plan[0]["Plan"])) == {"once_keys_pkey"}


def access_paths(node: dict[str, Any]) -> Iterator[str]:
    """Yield how the plan reads the rows of the table: an index that is probed by key, or another node."""
    if "Index Name" in node and node["Index Name"].startswith("once_keys"):
        yield node["Index Name"] if "(key = " in node.get("Index Cond", "") else f"all of {node['Index Name']}"
    elif node.get("Relation Name") == "once_keys" and node["Node Type"] not in {"Bitmap Heap Scan", "ModifyTable"}:
        yield node["Node Type"]
    for child in node.get("Plans", []):
        yield from access_paths(child)


# -- pruning ----------------------------------------------------------------------------------------------------------


async def prune(here: EngineHarness, batch: int = 100) -> int:
    async with here.database.autocommit() as connection:
        return (await prune_keys(connection, NAMESPACE, LONG_AGO, batch))[0]


async def test_expired_and_released_keys_are_pruned_in_batches_and_no_others(here: EngineHarness) -> None:
    async with taker(here, await instance(here, "one")) as one:
        await one.mark(await one.ask("kept"))
        await one.mark(await one.ask("old-1", "old-2"))
        await one.release(await one.ask("free"))
        await one.ask("pending")
    await here.sql("UPDATE once_keys SET expires_at = now() - interval '2 min' WHERE key IN ('old-1', 'old-2', 'free')")
    assert [await prune(here, 2) for _ in range(3)] == [2, 1, 0]
    assert await here.sql("SELECT key FROM once_keys ORDER BY key") == [("kept",), ("pending",)]


async def test_a_pending_key_of_a_dead_owner_is_pruned_after_a_day(here: EngineHarness) -> None:
    async with taker(here, await instance(here, "dead")) as dead, taker(here, await instance(here, "one")) as one:
        await dead.ask("left")
        await one.ask("held")
        await declare_gone(here, dead.owner)
    assert await prune(here) == 0
    await here.sql("UPDATE once_keys SET taken_at = now() - interval '25 h'")
    assert await prune(here) == 1
    assert await here.sql("SELECT key FROM once_keys") == [("held",)]


async def test_a_token_is_higher_than_all_earlier_ones_also_after_its_key_was_pruned(here: EngineHarness) -> None:
    async with taker(here, await instance(here, "one")) as one:
        tokens = []
        for _ in range(3):
            block = await one.ask("k")
            tokens.append(block.token)
            await one.release(block)
            await here.sql("DELETE FROM once_keys")
    assert tokens == sorted(set(tokens))


async def test_keys_that_a_living_owner_has_had_for_over_an_hour_are_counted_by_scope(here: EngineHarness) -> None:
    async with taker(here, await attempt(here)) as one, taker(here, await instance(here, "dead")) as dead:
        await one.ask("a", "b", "young")
        await one.mark(await one.ask("seen"))
        await dead.ask("c")
        await declare_gone(here, dead.owner)
    ((since,),) = await here.sql("SELECT now() - interval '2 h'")
    await here.sql("UPDATE once_keys SET taken_at = %s WHERE key <> 'young'", since)
    async with here.database.connection() as connection:
        assert await pending_too_long(connection, NAMESPACE) == [("s", 2, since)]
