"""Random sequences of claims, ends, pauses, deaths, checkpoints and requests, compared with a model.

Hypothesis chooses the steps; all statements are those of the engine, on a real database. Writes use any token that was
ever drawn, so most of them are late. The model has the invariants: a token is drawn once and only grows, a write counts
only with the present token of a running run, a run ends once, and no run is lost. Of the runs with one ordering key,
only the first that has not ended is claimed, and none while another one is running.
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
from app.fleet.runs.attempt_writes import CHECKPOINT
from app.fleet.runs.cancel import cancel_run
from app.fleet.runs.effects.notifications import WAITING_HEADING
from app.fleet.runs.end import END_CANCELLED, FINISH
from app.fleet.runs.requeue import REQUEUE
from app.fleet.runs.retry import retry_run
from tests.support.engine_harness import NAMESPACE, Claiming, EngineHarness, declare, engine_harness

FINISH_RETURNING = Statement(f"{FINISH}RETURNING id")

Answer = TypeVar("Answer")
INSTANCES = ("ann", "bob", "cyd")
ENDED = ("succeeded", "failed", "cancelled")


@dataclass
class Model:
    """The expected state of a run."""

    ordering_key: str | None = None
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
            # All claims so far: the run and its token.
            self.claims: list[tuple[int, int]] = []
            self.living: dict[str, Claiming] = {name: do(here.instance(name)) for name in INSTANCES}

        # -- steps of instances ---------------------------------------------------------------------------------------

        @rule(number=st.integers(1, 3), key=st.sampled_from([None, "a", "b"]))
        def trigger(self, number: int, key: str | None) -> None:
            for run_id in do(here.trigger(*[Order("tick", ordering_key=key)] * number)):
                self.model[run_id] = Model(key)

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
            """Return the pending runs without an ordering key, and the head of each key without a running run."""
            free = {run_id for run_id, run in self.model.items() if run.ordering_key is None and run.state == "pending"}
            for key in ("a", "b"):
                left = {
                    i: run.state for i, run in self.model.items() if run.ordering_key == key and run.state not in ENDED
                }
                if left and "running" not in left.values():
                    free.add(min(left))
            return free

        @precondition(lambda self: self.claims)
        @rule(
            data=st.data(),
            state=st.sampled_from([None, "failed", "cancelled"]),
        )
        def finish(self, data: st.DataObject, state: str | None) -> None:
            self.write_end(self.some_claims(data), state)

        def write_end(
            self, claimed: list[tuple[int, int]], state: str | None, statement: Statement = FINISH_RETURNING
        ) -> None:
            values = token_values(claimed) | {
                "states": [state] * len(claimed),
                "results": [None] * len(claimed),
                "errors": [None] * len(claimed),
            }
            done = {row[0] for row in do(execute(statement, values))}
            assert done == self.current_claims(claimed)
            for run_id in done:
                run = self.model[run_id]
                run.state = state or "succeeded"
                run.ends.append(run.state)

        @precondition(lambda self: self.claims)
        @rule(data=st.data(), pause=st.booleans())
        def give_back(self, data: st.DataObject, pause: bool) -> None:
            """Make runs pending: with a pause, or with a retry without a delay."""
            self.write_return(self.some_claims(data), pause)

        def write_return(self, claimed: list[tuple[int, int]], pause: bool) -> None:
            values = token_values(claimed) | {
                "pauses": [pause] * len(claimed),
                "delays": [0.0] * len(claimed),
                "errors": [None] * len(claimed),
                "heading": WAITING_HEADING,
            }
            back = {row[0] for row in do(execute(REQUEUE, values))}
            current_claims = self.current_claims(claimed)
            assert back == {run_id for run_id in current_claims if not self.model[run_id].cancel_requested}
            for run_id in back:
                run = self.model[run_id]
                run.state = "pending"
                run.attempt -= 1 if pause else 0
            # The writer does the same with the rest: runs with a cancellation request.
            left = [(run_id, token) for run_id, token in claimed if run_id not in back]
            self.write_end(left, "cancelled", END_CANCELLED)

        @precondition(lambda self: self.claims)
        @rule(data=st.data(), state=st.integers(0, 99))
        def checkpoint(self, data: st.DataObject, state: int) -> None:
            self.write_checkpoint(self.some_claims(data), state)

        def write_checkpoint(self, claimed: list[tuple[int, int]], state: int) -> None:
            values = token_values(claimed) | {"states": [str(state)] * len(claimed)}
            kept = {row[0] for row in do(execute(CHECKPOINT, values))}
            assert kept == self.current_claims(claimed)
            for run_id in kept:
                self.model[run_id].checkpoint = state

        @precondition(lambda self: any(run.token > 1 and run.state == "running" for run in self.model.values()))
        @rule(data=st.data())
        def write_late(self, data: st.DataObject) -> None:
            """Another instance runs the run by now: all writes of the former owner are refused."""
            again = [run_id for run_id, run in self.model.items() if run.token > 1 and run.state == "running"]
            run_id = data.draw(st.sampled_from(sorted(again)))
            token = data.draw(st.integers(1, self.model[run_id].token - 1))
            self.write_checkpoint([(run_id, token)], 1)
            self.write_return([(run_id, token)], False)
            self.write_end([(run_id, token)], None)

        # -- deaths and requests --------------------------------------------------------------------------------------

        @rule(name=st.sampled_from(INSTANCES))
        def die(self, name: str) -> None:
            """An instance dies, and a new one takes its name, with another id."""
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
                assert do(is_refused(cancel_run, run_id))
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
                assert do(is_refused(retry_run, run_id))
                return
            do(call(retry_run, run_id))
            if run.state in ENDED:
                run.state, run.attempt, run.deaths, run.cancel_requested = "pending", 0, 0, False

        # -- invariants -----------------------------------------------------------------------------------------------

        @invariant()
        def the_tables_agree_with_the_model(self) -> None:
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
            ], "each run exists once, in its expected state"

        @invariant()
        def a_run_succeeds_once(self) -> None:
            assert all(run.ends.count("succeeded") <= 1 for run in self.model.values())

        @invariant()
        def each_running_run_has_a_living_owner(self) -> None:
            orphans = """
                SELECT id FROM runs AS r WHERE state = 'running'
                AND NOT EXISTS (SELECT FROM instances AS i WHERE i.id = r.instance_id AND i.state <> 'gone')
            """
            assert do(here.sql(orphans)) == []

        def some_claims(self, data: st.DataObject) -> list[tuple[int, int]]:
            return data.draw(st.lists(st.sampled_from(self.claims), min_size=1, max_size=3, unique=True))

        def current_claims(self, claimed: list[tuple[int, int]]) -> set[int]:
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

    async def is_refused(what: Callable[..., Coroutine[Any, Any, Any]], run_id: int) -> bool:
        try:
            await call(what, run_id)
        except RunNotReady:
            return True
        return False

    return Protocol


def token_values(claimed: list[tuple[int, int]]) -> dict[str, Any]:
    return {"ids": [run_id for run_id, _ in claimed], "tokens": [token for _, token in claimed]}


def test_no_sequence_of_transitions_breaks_the_protocol_of_runs(address: str) -> None:
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
