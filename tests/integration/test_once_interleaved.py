"""Who has a key when several want it: of two in the same moment, of a dead owner, of one who comes late.

Statements by hand, each session at the very point where it matters.
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
    """One database for all of these."""
    address = postgres.new_database()
    async with engine_harness(address, declare()) as own:
        yield own
    postgres.drop(address)


@pytest.fixture
async def here(prepared: EngineHarness) -> EngineHarness:
    await prepared.sql("TRUNCATE once_keys, runs, instances")
    return prepared


@dataclass
class Asker:
    """One who takes keys, marks them and gives them back, on a session of its own."""

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
async def asker(here: EngineHarness, owner: Owner) -> AsyncIterator[Asker]:
    async with await psycopg.AsyncConnection.connect(here.address, autocommit=True) as session:
        yield Asker(owner, session)


async def instance(here: EngineHarness, name: str) -> Owner:
    return Owner((await here.instance(name)).identity.id, None)


async def attempt(here: EngineHarness, name: str = "runs") -> Owner:
    """An attempt that is under way, on an instance of its own."""
    await here.trigger(Order("tick"))
    one = await here.instance(name)
    (claimed,) = await one.claim(room=1)
    attempt = SimpleNamespace(run_id=claimed.run_id, token=claimed.token, number=1, committed=False)
    return Owner(one.identity.id, cast("Attempt", attempt))


async def waits(here: EngineHarness, session: Connection) -> None:
    """Until that session waits for a lock."""
    blocked = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    await soon(lambda: here.sql(blocked, session.info.backend_pid))


async def kill(here: EngineHarness, owner: Owner) -> None:
    """Declare its instance gone, as the leader does."""
    register = Registry(NAMESPACE, [Rescue(NAMESPACE)])
    with psycopg.connect(here.address, autocommit=True) as leader:
        assert register.declare_gone(leader, owner.instance, "it looks dead") is not None


# -- in the same moment -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["new", "free", "expired", "dead"])
async def test_of_two_who_ask_in_the_same_moment_one_has_the_key(here: EngineHarness, before: str) -> None:
    async with asker(here, await instance(here, "one")) as one, asker(here, await attempt(here)) as two:
        await prepare(here, before)
        async with one.session.transaction():
            first = await one.ask("k")
            asking = asyncio.create_task(two.ask("k"))
            await waits(here, two.session)
        second = await asking
    assert (first.states, second.states) == ({"k": "new"}, {"k": "pending"})


async def prepare(here: EngineHarness, state: str) -> None:
    """A key that was there before, and is nobody's."""
    if state == "new":
        return
    async with asker(here, await instance(here, "former")) as former:
        block = await former.ask("k")
        if state == "free":
            await former.release(block)
        elif state == "expired":
            await former.mark(block)
            await here.sql("UPDATE once_keys SET expires_at = now() - interval '1 s'")
        else:
            await kill(here, former.owner)


async def test_if_the_first_of_them_does_not_commit_the_second_has_it(here: EngineHarness) -> None:
    async with asker(here, await instance(here, "one")) as one, asker(here, await instance(here, "two")) as two:
        async with one.session.transaction(force_rollback=True):
            await one.ask("k")
            asking = asyncio.create_task(two.ask("k"))
            await waits(here, two.session)
        assert (await asking).states == {"k": "new"}


async def test_of_ten_who_ask_for_the_same_hundred_keys_each_key_has_one(here: EngineHarness) -> None:
    keys = [f"k-{number}" for number in range(100)]
    async with asker(here, await instance(here, "one")) as one:
        sessions = [await psycopg.AsyncConnection.connect(here.address, autocommit=True) for _ in range(10)]
        blocks = await asyncio.gather(*(Asker(one.owner, session).ask(*keys) for session in sessions))
        for session in sessions:
            await session.close()
    assert sorted(key for block in blocks for key in block.keys) == sorted(keys)


@pytest.mark.parametrize("before", ["new", "free"])
@pytest.mark.parametrize("kind", [attempt, instance])
async def test_an_owner_who_is_younger_than_the_question_is_not_taken_for_dead(
    here: EngineHarness, kind: Any, before: str
) -> None:
    """The question has begun, and waits at another key, while its answer about this one becomes out of date."""
    await prepare(here, before)
    async with (
        asker(here, await instance(here, "holder")) as holder,
        asker(here, await instance(here, "asks")) as asks,
    ):
        async with holder.session.transaction(force_rollback=True):
            await holder.ask("a")
            asking = asyncio.create_task(asks.ask("a", "k"))
            await waits(here, asks.session)
            # Neither this run, or instance, nor its key was there when the question began.
            async with asker(here, await kind(here, "young")) as young:
                assert (await young.ask("k")).states == {"k": "new"}
        assert (await asking).states == {"a": "new", "k": "pending"}


async def test_a_key_that_becomes_seen_in_that_moment_is_not_taken_from_an_owner_who_is_gone(
    here: EngineHarness,
) -> None:
    """It was gone when the question began, but its transaction was not over yet."""
    async with asker(here, await instance(here, "late")) as late, asker(here, await instance(here, "asks")) as asks:
        block = await late.ask("k")
        async with late.session.transaction():
            assert await late.mark(block)
            await kill(here, late.owner)
            asking = asyncio.create_task(asks.ask("k"))
            await waits(here, asks.session)
        assert (await asking).keys == []
        assert (await asks.ask("k")).states == {"k": "seen"}


async def test_batches_in_opposite_orders_wait_for_each_other_but_never_both_ways(here: EngineHarness) -> None:
    keys = [f"k-{number}" for number in range(300)]

    async def take_and_end(one: Asker, mine: list[str]) -> None:
        for number in range(20):
            block = await one.ask(*mine)
            # Forgotten as soon as it is seen, so that there is something to take each time.
            block.keep = 0.0
            await (one.mark(block) if number % 2 else one.release(block))

    owner = await instance(here, "one")
    async with asker(here, owner) as one, asker(here, owner) as two, asker(here, owner) as three:
        await asyncio.gather(
            take_and_end(one, keys), take_and_end(two, keys[::-1]), take_and_end(three, keys[150:] + keys[:150])
        )


# -- owners who have ended --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [attempt, instance])
async def test_a_living_owner_keeps_its_key_and_a_dead_ones_is_free_at_once(here: EngineHarness, kind: Any) -> None:
    async with asker(here, await kind(here, "owner")) as owner, asker(here, await instance(here, "asks")) as asks:
        await owner.ask("k")
        assert (await asks.ask("k")).states == {"k": "pending"}
        await kill(here, owner.owner)
        assert (await asks.ask("k")).states == {"k": "new"}


@pytest.mark.parametrize(
    "what", ["UPDATE runs SET state = 'pending'", "UPDATE runs SET token = token + 1", "DELETE FROM runs"]
)
async def test_an_attempt_that_is_over_frees_its_key_whatever_comes_after_it(here: EngineHarness, what: str) -> None:
    async with asker(here, await attempt(here)) as owner, asker(here, await instance(here, "asks")) as asks:
        await owner.ask("k")
        await here.sql(what)
        assert (await asks.ask("k")).states == {"k": "new"}


async def test_whoever_was_declared_gone_takes_nothing(here: EngineHarness) -> None:
    async with asker(here, await instance(here, "gone")) as gone:
        await kill(here, gone.owner)
        with pytest.raises(PermissionError):
            await gone.ask("k")
    assert await here.sql("SELECT 1 FROM once_keys") == []


async def test_an_attempt_whose_run_was_taken_over_takes_nothing(here: EngineHarness) -> None:
    async with asker(here, await attempt(here)) as late:
        await here.sql("UPDATE runs SET token = token + 1")
        with pytest.raises(PermissionError):
            await late.ask("k")
    assert await here.sql("SELECT 1 FROM once_keys") == []


async def test_while_a_key_is_being_taken_its_owner_is_not_declared_gone(here: EngineHarness) -> None:
    register = Registry(NAMESPACE, [Rescue(NAMESPACE)])
    async with asker(here, await instance(here, "one")) as one:
        async with one.session.transaction():
            await one.ask("k")
            with psycopg.connect(here.address, autocommit=True) as leader:
                assert register.declare_gone(leader, one.owner.instance, "it looks dead") is None
        await kill(here, one.owner)


# -- late ones --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [attempt, instance])
async def test_an_owner_who_was_overtaken_marks_nothing(here: EngineHarness, kind: Any) -> None:
    async with asker(here, await kind(here, "late")) as late, asker(here, await instance(here, "next")) as following:
        block = await late.ask("k")
        await kill(here, late.owner)
        assert (await following.ask("k")).states == {"k": "new"}
        assert not await late.mark(block)
        await late.release(block)
        assert await here.sql("SELECT state, instance_id FROM once_keys") == [("pending", following.owner.instance)]


async def test_a_key_with_another_token_is_not_marked_by_a_living_owner_either(here: EngineHarness) -> None:
    async with asker(here, await instance(here, "one")) as one:
        block = await one.ask("k")
        await here.sql("UPDATE once_keys SET token = token + 1")
        assert not await one.mark(block)
        await one.release(block)
    assert await here.sql("SELECT state FROM once_keys") == [("pending",)]


@pytest.mark.parametrize("kind", [attempt, instance])
async def test_an_owner_who_has_ended_marks_nothing_even_if_nobody_has_asked_for_its_key(
    here: EngineHarness, kind: Any
) -> None:
    async with asker(here, await kind(here, "late")) as late:
        block = await late.ask("k")
        await kill(here, late.owner)
        assert not await late.mark(block)


async def test_a_batch_is_marked_as_a_whole_or_not_at_all(here: EngineHarness) -> None:
    async with asker(here, await instance(here, "one")) as one:
        block = await one.ask("a", "b", "c")
        await here.sql("UPDATE once_keys SET token = token + 1 WHERE key = 'b'")
        assert not await one.mark(block)
    assert await here.sql("SELECT DISTINCT state FROM once_keys") == [("pending",)]


async def test_an_attempt_that_marks_is_not_taken_over_before_its_transaction_ends(here: EngineHarness) -> None:
    async with asker(here, await attempt(here)) as one:
        block = await one.ask("k")
        async with one.session.transaction():
            assert await one.mark(block)
            with psycopg.connect(here.address, autocommit=True) as death:
                Rescue(NAMESPACE)(death, [one.owner.instance])
            assert await here.sql("SELECT state FROM runs") == [("running",)]


async def test_who_drew_its_token_before_another_does_not_take_the_key_after_it(here: EngineHarness) -> None:
    async with asker(here, await instance(here, "one")) as one:
        early = Block(one.owner, "s", ["k"], 3600.0)
        ((early.token,),) = await fetch(one.session, NAMESPACE.sql(DRAW_TOKEN))
        await one.release(await one.ask("k"))
        states = dict(await fetch(one.session, NAMESPACE.sql(TAKE), early.values))
        assert "k" not in states


@pytest.mark.parametrize("statement", [TAKE, MARK, RELEASE])
async def test_keys_are_found_by_the_primary_key_alone(here: EngineHarness, statement: Statement) -> None:
    """Among rows of which few are pending, and with a batch that makes reading all of them look cheap."""
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
    assert set(ways(plan[0]["Plan"])) == {"once_keys_pkey"}


def ways(node: dict[str, Any]) -> Iterator[str]:
    """How the plan gets to the rows of the table: an index that it asks for keys, or whatever else."""
    if "Index Name" in node and node["Index Name"].startswith("once_keys"):
        yield node["Index Name"] if "(key = " in node.get("Index Cond", "") else f"all of {node['Index Name']}"
    elif node.get("Relation Name") == "once_keys" and node["Node Type"] not in {"Bitmap Heap Scan", "ModifyTable"}:
        yield node["Node Type"]
    for child in node.get("Plans", []):
        yield from ways(child)


# -- forgetting -------------------------------------------------------------------------------------------------------


async def forget(here: EngineHarness, batch: int = 100) -> int:
    async with here.database.autocommit() as connection:
        return (await prune_keys(connection, NAMESPACE, LONG_AGO, batch))[0]


async def test_what_is_over_is_forgotten_in_batches_and_nothing_else(here: EngineHarness) -> None:
    async with asker(here, await instance(here, "one")) as one:
        await one.mark(await one.ask("kept"))
        await one.mark(await one.ask("old-1", "old-2"))
        await one.release(await one.ask("free"))
        await one.ask("pending")
    await here.sql("UPDATE once_keys SET expires_at = now() - interval '2 min' WHERE key IN ('old-1', 'old-2', 'free')")
    assert [await forget(here, 2) for _ in range(3)] == [2, 1, 0]
    assert await here.sql("SELECT key FROM once_keys ORDER BY key") == [("kept",), ("pending",)]


async def test_a_key_that_a_dead_owner_left_behind_is_forgotten_after_a_day(here: EngineHarness) -> None:
    async with asker(here, await instance(here, "dead")) as dead, asker(here, await instance(here, "one")) as one:
        await dead.ask("left")
        await one.ask("held")
        await kill(here, dead.owner)
    assert await forget(here) == 0
    await here.sql("UPDATE once_keys SET taken_at = now() - interval '25 h'")
    assert await forget(here) == 1
    assert await here.sql("SELECT key FROM once_keys") == [("held",)]


async def test_a_token_is_higher_than_those_before_it_also_when_the_key_was_forgotten(here: EngineHarness) -> None:
    async with asker(here, await instance(here, "one")) as one:
        tokens = []
        for _ in range(3):
            block = await one.ask("k")
            tokens.append(block.token)
            await one.release(block)
            await here.sql("DELETE FROM once_keys")
    assert tokens == sorted(set(tokens))


async def test_what_a_living_owner_has_had_for_more_than_an_hour_is_a_figure(here: EngineHarness) -> None:
    async with asker(here, await attempt(here)) as one, asker(here, await instance(here, "dead")) as dead:
        await one.ask("a", "b", "young")
        await one.mark(await one.ask("seen"))
        await dead.ask("c")
        await kill(here, dead.owner)
    ((since,),) = await here.sql("SELECT now() - interval '2 h'")
    await here.sql("UPDATE once_keys SET taken_at = %s WHERE key <> 'young'", since)
    async with here.database.connection() as connection:
        assert await pending_too_long(connection, NAMESPACE) == [("s", 2, since)]
