"""Random sequences of blocks, owners that end, and keys that expire and are pruned, compared with a model.

Hypothesis chooses the steps; all statements are those of `once`, on a real database. Steps use blocks with any token
that was ever drawn, so most of them are late. The model knows the owner of each key. The test checks that a key is
fresh exactly if it is not seen and no living owner processes it, and that only its present owner can mark it as seen.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from app.fleet.db.namespace import Statement
from app.fleet.db.pool.statements import fetch
from app.fleet.engine.execute.attempt import Attempt
from app.fleet.engine.maintenance.pruner import LONG_AGO
from app.fleet.engine.once.block import Block, Owner
from app.fleet.engine.once.housekeeping import prune_keys
from app.fleet.engine.once.statements import DRAW_TOKEN, MARK, RELEASE, TAKE
from tests.support.engine_harness import NAMESPACE, EngineHarness, engine_harness

KEYS = ("a", "b", "c")
SOME_KEYS = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)


@dataclass
class Key:
    """The expected row of a key; no row while it is absent."""

    state: str = "absent"
    token: int = 0
    owner: int = 0


def machine(here: EngineHarness, do: Callable[[Coroutine[Any, Any, Any]], Any]) -> type[RuleBasedStateMachine]:
    names = count()

    class Protocol(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            do(here.sql("TRUNCATE once_keys, runs, instances"))
            self.keys = {key: Key() for key in KEYS}
            self.owners: list[Owner] = []
            # Each owner has its own instance.
            self.living: set[int] = set()
            # All blocks so far.
            self.blocks: list[Block] = []
            self.join_as_instance()

        # -- owners ---------------------------------------------------------------------------------------------------

        @rule()
        def join_as_instance(self) -> None:
            self.add(Owner(do(here.instance(f"i-{next(names)}")).identity.id, None))

        @rule()
        def begin_an_attempt(self) -> None:
            insert = """
                INSERT INTO runs (action_id, state, priority, run_at, token, max_attempts, trigger)
                VALUES (1, 'running', 0, now(), 1, 1, 'code') RETURNING id
            """
            ((run_id,),) = do(here.sql(insert))
            attempt = SimpleNamespace(run_id=run_id, token=1, number=1, committed=False)
            self.add(Owner(do(here.instance(f"i-{next(names)}")).identity.id, cast("Attempt", attempt)))

        def add(self, owner: Owner) -> None:
            self.owners.append(owner)
            self.living.add(owner.instance)

        @rule(data=st.data())
        def end(self, data: st.DataObject) -> None:
            owner = data.draw(st.sampled_from(self.owners))
            if owner.attempt is None:
                do(here.sql("UPDATE instances SET state = 'gone' WHERE id = %s", owner.instance))
            else:
                do(here.sql("UPDATE runs SET state = 'pending' WHERE id = %s", owner.attempt.run_id))
            self.living.discard(owner.instance)

        # -- steps of blocks ------------------------------------------------------------------------------------------

        @rule(data=st.data(), keys=SOME_KEYS)
        def ask(self, data: st.DataObject, keys: list[str]) -> None:
            block = Block(data.draw(st.sampled_from(self.owners)), "s", list(keys), 3600.0)
            ((block.token,),) = do(execute(DRAW_TOKEN))
            states = dict(do(execute(TAKE, block)))
            assert (None in states) == (block.owner.instance in self.living)
            if None not in states:
                return
            block.set_states(states)
            assert block.states == {key: self.expected(self.keys[key]) for key in keys}
            for key in block.keys:
                assert block.token > self.keys[key].token
                self.keys[key] = Key("pending", block.token, block.owner.instance)
            self.blocks.append(block)

        def expected(self, key: Key) -> str:
            if key.state == "pending":
                return "pending" if key.owner in self.living else "new"
            return "seen" if key.state == "seen" else "new"

        @precondition(lambda self: self.blocks)
        @rule(data=st.data())
        def mark(self, data: st.DataObject) -> None:
            block = data.draw(st.sampled_from(self.blocks))
            ((marked,),) = do(execute(MARK, block))
            right = block.owner.instance in self.living and len(self.held(block)) == len(block.keys)
            assert marked == (len(block.keys) if right else 0)
            for key in block.keys[:marked]:
                self.keys[key].state = "seen"

        @precondition(lambda self: self.blocks)
        @rule(data=st.data())
        def release(self, data: st.DataObject) -> None:
            block = data.draw(st.sampled_from(self.blocks))
            do(execute(RELEASE, block))
            for key in self.held(block):
                self.keys[key].state = "free"

        def held(self, block: Block) -> list[str]:
            present = [(key, self.keys[key]) for key in block.keys]
            return [name for name, key in present if key.state == "pending" and key.token == block.token]

        # -- steps of keys --------------------------------------------------------------------------------------------

        @rule(key=st.sampled_from(KEYS))
        def expire(self, key: str) -> None:
            over = "UPDATE once_keys SET expires_at = now() - interval '2 min' WHERE key = %s AND state <> 'pending'"
            do(here.sql(over, key))
            if self.keys[key].state == "seen":
                self.keys[key].state = "over"

        @rule()
        def forget(self) -> None:
            do(prune())

        # -- invariants -----------------------------------------------------------------------------------------------

        @invariant()
        def the_table_agrees_with_the_model(self) -> None:
            rows = dict(do(here.sql("SELECT key, (state, token)::text FROM once_keys")))
            for name, key in self.keys.items():
                row = rows.get(name)
                if key.state in {"pending", "seen"}:
                    assert row == f"({key.state},{key.token})"
                else:
                    assert row in {None, f"(free,{key.token})", f"(seen,{key.token})"}

    async def execute(statement: Statement, block: Block | None = None) -> Any:
        async with here.database.autocommit() as connection:
            return await fetch(connection, NAMESPACE.sql(statement), block.values if block else None)

    async def prune() -> None:
        async with here.database.autocommit() as connection:
            await prune_keys(connection, NAMESPACE, LONG_AGO, 100)

    return Protocol


def test_no_sequence_of_steps_makes_a_key_seen_unprocessed_or_fresh_for_two_owners(address: str) -> None:
    with asyncio.Runner() as runner:
        context = engine_harness(address)
        here = runner.run(context.__aenter__())
        try:
            run_state_machine_as_test(
                machine(here, runner.run),
                settings=settings(
                    max_examples=20,
                    stateful_step_count=30,
                    deadline=None,
                    derandomize=True,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(context.__aexit__(None, None, None))
