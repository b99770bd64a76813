"""Any order of claims, ends, pauses, deaths, checkpoints and requests, held against a model of what may happen.

Hypothesis chooses; every statement is the engine's own, on a real database. Writers come with every token that was ever
drawn, so most of them are late. The model is what DESIGN calls the invariants: a token is drawn once and only grows, a
write counts only with the present token of a running run, a run ends once, and nothing is ever lost. Of a line, the
first one is claimed that has not ended, and nothing beside one that runs.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psycopg
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from app.fleet.db.namespace import Statement
from app.fleet.db.pool.statements import fetch
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.maintenance.rescuer import Rescue
from app.fleet.errors import RunNotReady
from app.fleet.runs.cancel import cancel_run
from app.fleet.runs.end import END_CANCELLED, FINISH
from app.fleet.runs.requeue import GIVE_BACK
from app.fleet.runs.retry import retry_run
from app.fleet.runs.writes import CHECKPOINT
from tests.support.engine_harness import NAMESPACE, Claiming, EngineHarness, declare, engine_harness

FINISH_RETURNING = Statement(f"{FINISH}RETURNING id")

Answer = TypeVar("Answer")
INSTANCES = ("ann", "bob", "cyd")
ENDED = ("succeeded", "failed", "cancelled")


@dataclass
class Model:
    """What a run must be."""

    line: str | None = None
    state: str = "pending"
    token: int = 0
    attempt: int = 0
    deaths: int = 0
    owner: str | None = None
    checkpoint: int | None = None
    cancel_requested: bool = False
    ends: list[str] = field(default_factory=list)


def machine(
    here: EngineHarness, do: Callable[[Coroutine[Any, Any, Any]], Any], address: str
) -> type[RuleBasedStateMachine]:
    class Protocol(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            do(here.sql("TRUNCATE runs, finished_runs, run_keys, instances"))
            self.model: dict[int, Model] = {}
            # Every claim there ever was: a run, and the token it was given.
            self.claims: list[tuple[int, int]] = []
            self.living: dict[str, Claiming] = {name: do(here.instance(name)) for name in INSTANCES}

        # -- what instances do ----------------------------------------------------------------------------------------

        @rule(number=st.integers(1, 3), line=st.sampled_from([None, "a", "b"]))
        def trigger(self, number: int, line: str | None) -> None:
            for run_id in do(here.trigger(*[Order("tick", ordering_key=line)] * number)):
                self.model[run_id] = Model(line)

        @rule(name=st.sampled_from(INSTANCES), room=st.integers(1, 3))
        def claim(self, name: str, room: int) -> None:
            claimed = do(self.living[name].claim(room=room))
            waiting = self.claimable()
            assert len(claimed) == min(room, len(waiting))
            for run_id, token, _ in claimed:
                assert run_id in waiting
                run = self.model[run_id]
                assert run.state == "pending"
                assert token == run.token + 1
                run.state, run.token, run.owner = "running", token, name
                run.attempt += 1
                self.claims.append((run_id, token))

        def claimable(self) -> set[int]:
            """What waits in no line, and the first of each line in which nothing runs."""
            free = {run_id for run_id, run in self.model.items() if run.line is None and run.state == "pending"}
            for line in ("a", "b"):
                left = {i: run.state for i, run in self.model.items() if run.line == line and run.state not in ENDED}
                if left and "running" not in left.values():
                    free.add(min(left))
            return free

        @precondition(lambda self: self.claims)
        @rule(
            data=st.data(),
            state=st.sampled_from([None, "failed", "cancelled"]),
        )
        def finish(self, data: st.DataObject, state: str | None) -> None:
            self.write_end(self.some(data), state)

        def write_end(
            self, claimed: list[tuple[int, int]], state: str | None, statement: Statement = FINISH_RETURNING
        ) -> None:
            values = written(claimed) | {
                "states": [state] * len(claimed),
                "results": [None] * len(claimed),
                "errors": [None] * len(claimed),
            }
            done = {row[0] for row in do(execute(statement, values))}
            assert done == self.current(claimed)
            for run_id in done:
                run = self.model[run_id]
                run.state = state or "succeeded"
                run.ends.append(run.state)

        @precondition(lambda self: self.claims)
        @rule(data=st.data(), pause=st.booleans())
        def give_back(self, data: st.DataObject, pause: bool) -> None:
            """A pause, or a retry without a wait."""
            self.write_return(self.some(data), pause)

        def write_return(self, claimed: list[tuple[int, int]], pause: bool) -> None:
            values = written(claimed) | {
                "pauses": [pause] * len(claimed),
                "delays": [0.0] * len(claimed),
                "errors": [None] * len(claimed),
            }
            back = {row[0] for row in do(execute(GIVE_BACK, values))}
            current = self.current(claimed)
            assert back == {run_id for run_id in current if not self.model[run_id].cancel_requested}
            for run_id in back:
                run = self.model[run_id]
                run.state = "pending"
                run.attempt -= 1 if pause else 0
            # As the writer does with what was left.
            left = [(run_id, token) for run_id, token in claimed if run_id not in back]
            self.write_end(left, "cancelled", END_CANCELLED)

        @precondition(lambda self: self.claims)
        @rule(data=st.data(), state=st.integers(0, 99))
        def checkpoint(self, data: st.DataObject, state: int) -> None:
            self.write_checkpoint(self.some(data), state)

        def write_checkpoint(self, claimed: list[tuple[int, int]], state: int) -> None:
            values = written(claimed) | {"states": [str(state)] * len(claimed)}
            kept = {row[0] for row in do(execute(CHECKPOINT, values))}
            assert kept == self.current(claimed)
            for run_id in kept:
                self.model[run_id].checkpoint = state

        @precondition(lambda self: any(run.token > 1 and run.state == "running" for run in self.model.values()))
        @rule(data=st.data())
        def write_late(self, data: st.DataObject) -> None:
            """Somebody else runs it by now; whatever its former owner still says is refused."""
            again = [run_id for run_id, run in self.model.items() if run.token > 1 and run.state == "running"]
            run_id = data.draw(st.sampled_from(sorted(again)))
            token = data.draw(st.integers(1, self.model[run_id].token - 1))
            self.write_checkpoint([(run_id, token)], 1)
            self.write_return([(run_id, token)], False)
            self.write_end([(run_id, token)], None)

        # -- what happens to them -------------------------------------------------------------------------------------

        @rule(name=st.sampled_from(INSTANCES))
        def die(self, name: str) -> None:
            """And another one takes its name, under another id."""
            dead = self.living[name].identity.id
            with psycopg.connect(address) as session:
                session.execute("UPDATE flotilla.instances SET state = 'gone' WHERE id = %s", [dead])
                Rescue(NAMESPACE)(session, [dead])
            for run in self.model.values():
                if run.state == "running" and run.owner == name and run.cancel_requested:
                    run.state = "cancelled"
                    run.ends.append("cancelled")
                elif run.state == "running" and run.owner == name:
                    run.state = "pending"
                    run.deaths += 1
            self.living[name] = do(here.instance(name))

        @precondition(lambda self: self.model)
        @rule(data=st.data())
        def cancel(self, data: st.DataObject) -> None:
            run_id = data.draw(st.sampled_from(sorted(self.model)))
            run = self.model[run_id]
            if run.state in ENDED:
                assert do(refused(cancel_run, run_id))
                return
            do(call(cancel_run, run_id))
            if run.state == "pending":
                run.state = "cancelled"
                run.ends.append("cancelled")
            else:
                run.cancel_requested = True

        @precondition(lambda self: self.model)
        @rule(data=st.data())
        def revive(self, data: st.DataObject) -> None:
            run_id = data.draw(st.sampled_from(sorted(self.model)))
            run = self.model[run_id]
            if run.state in {"running", "succeeded"}:
                assert do(refused(retry_run, run_id))
                return
            do(call(retry_run, run_id))
            if run.state in ENDED:
                run.state, run.attempt, run.deaths, run.cancel_requested = "pending", 0, 0, False

        # -- what must be true ----------------------------------------------------------------------------------------

        @invariant()
        def the_tables_say_what_the_model_says(self) -> None:
            rows = do(
                here.sql(
                    """
                    SELECT id, state, token, attempt, checkpoint FROM runs
                    UNION ALL SELECT id, state, token, attempt, checkpoint FROM finished_runs
                    ORDER BY id
                    """
                )
            )
            assert rows == [
                (run_id, run.state, run.token, run.attempt, run.checkpoint)
                for run_id, run in sorted(self.model.items())
            ], "each run is there once, and as it must be"

        @invariant()
        def a_run_succeeds_once(self) -> None:
            assert all(run.ends.count("succeeded") <= 1 for run in self.model.values())

        @invariant()
        def whatever_runs_has_an_owner_that_lives(self) -> None:
            orphans = """
                SELECT id FROM runs AS r WHERE state = 'running'
                AND NOT EXISTS (SELECT FROM instances AS i WHERE i.id = r.instance_id AND i.state <> 'gone')
            """
            assert do(here.sql(orphans)) == []

        def some(self, data: st.DataObject) -> list[tuple[int, int]]:
            return data.draw(st.lists(st.sampled_from(self.claims), min_size=1, max_size=3, unique=True))

        def current(self, claimed: list[tuple[int, int]]) -> set[int]:
            return {
                run_id
                for run_id, token in claimed
                if self.model[run_id].state == "running" and self.model[run_id].token == token
            }

    async def execute(statement: Statement, values: dict[str, Any]) -> Any:
        async with here.database.connection() as connection:
            return await fetch(connection, NAMESPACE.sql(statement), values)

    async def call(what: Callable[..., Coroutine[Any, Any, Any]], run_id: int) -> Any:
        async with here.database.connection() as connection:
            return await what(connection, NAMESPACE, run_id)

    async def refused(what: Callable[..., Coroutine[Any, Any, Any]], run_id: int) -> bool:
        try:
            await call(what, run_id)
        except RunNotReady:
            return True
        return False

    return Protocol


def written(claimed: list[tuple[int, int]]) -> dict[str, Any]:
    return {"ids": [run_id for run_id, _ in claimed], "tokens": [token for _, token in claimed]}


def test_nothing_that_may_happen_breaks_the_protocol(address: str) -> None:
    with asyncio.Runner() as runner:
        context = engine_harness(address, declare(retries=1000))
        here = runner.run(context.__aenter__())
        try:
            run_state_machine_as_test(
                machine(here, runner.run, address),
                settings=settings(
                    max_examples=50,
                    stateful_step_count=40,
                    deadline=None,
                    derandomize=True,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(context.__aexit__(None, None, None))
