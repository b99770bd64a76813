"""A key is processed once: fresh for one block, seen after that block has succeeded, fresh again if it has failed."""

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from app.fleet import Fenced, FleetError, Run, action, once, once_many, trigger
from app.fleet.db.pool import statements
from app.fleet.db.pool.pool import DatabaseAway
from app.fleet.engine.maintenance import pruner
from app.fleet.engine.once import block as blocks
from app.fleet.errors import EngineError
from tests.support.postgres import Postgres
from tests.support.runs import LocalInstance, local_instance, soon
from tests.support.trial_actions import EFFECT, EFFECTS, effect

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("here")]

MAX_LENGTHS = (blocks.MAX_SCOPE_LENGTH, blocks.MAX_KEY_LENGTH)
NOTE = text("INSERT INTO public.effects (note) VALUES (:note)")


@action("end-inside")
async def end_inside(run: Run) -> None:
    """Complete the run within a block, which marks its key afterwards."""
    async with once("end-inside", "k"), run.commit() as transaction:
        await transaction.execute(EFFECT, effect(run, "end-inside"))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def service(postgres: Postgres) -> AsyncIterator[LocalInstance]:
    """One instance for all tests of this module; each test has its own scope."""
    address = postgres.new_database()
    async with local_instance(address, actions=("tests.support.trial_actions", __name__)) as own:
        await own.sql(EFFECTS)
        yield own
    postgres.drop(address)


@pytest.fixture
async def here(service: LocalInstance) -> LocalInstance:
    service.engine.enter()
    return service


async def states(here: LocalInstance, scope: str) -> dict[str, str]:
    return dict(await here.sql("SELECT key, state FROM once_keys WHERE scope = %s", scope))


async def count_notes(here: LocalInstance, note: str) -> int:
    ((count,),) = await here.sql("SELECT count(*) FROM effects WHERE note = %s", note)
    return int(count)


# -- one key ----------------------------------------------------------------------------------------------------------


async def test_a_key_is_fresh_once_and_then_seen() -> None:
    async with once("twice", "k") as first:
        assert first
    async with once("twice", "k") as second:
        assert not second
    assert (first.state, second.state) == ("new", "seen")


async def test_the_same_key_in_two_scopes_is_two_keys() -> None:
    async with once("scope-a", "k") as first, once("scope-b", "k") as second:
        assert first
        assert second


async def test_a_key_becomes_seen_in_the_transaction_of_its_session(here: LocalInstance) -> None:
    async with once("together", "k") as fresh:
        await fresh.session.execute(NOTE, {"note": "together"})
        assert (await states(here, "together"), await count_notes(here, "together")) == ({"k": "pending"}, 0)
    assert (await states(here, "together"), await count_notes(here, "together")) == ({"k": "seen"}, 1)
    assert await here.sql(
        "SELECT e.xmin = k.xmin FROM effects AS e, once_keys AS k WHERE e.note = 'together' AND k.scope = 'together'"
    ) == [(True,)]


async def fail(scope: str, error: type[BaseException]) -> None:
    async with once(scope, "k") as fresh:
        await fresh.session.execute(NOTE, {"note": scope})
        raise error


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_a_body_that_fails_leaves_no_effect_and_its_key_becomes_fresh_again(
    here: LocalInstance, error: type[BaseException]
) -> None:
    scope = error.__name__
    with pytest.raises(error):
        await fail(scope, error)
    assert (await states(here, scope), await count_notes(here, scope)) == ({"k": "free"}, 0)
    async with once(scope, "k") as again:
        assert again.state == "new"


async def test_a_run_triggered_in_the_session_exists_exactly_if_the_key_is_seen(here: LocalInstance) -> None:
    async def trigger_and_fail() -> None:
        async with once("outbox", "k") as fresh:
            await trigger("echo", {"n": 1}, session=fresh.session)
            raise ValueError

    made = "SELECT payload->>'n' FROM (SELECT payload FROM runs UNION ALL SELECT payload FROM finished_runs) AS r"
    with pytest.raises(ValueError):  # noqa: PT011 — ours has no text
        await trigger_and_fail()
    assert ("1",) not in await here.sql(made)
    async with once("outbox", "k") as fresh:
        run_id = await trigger("echo", {"n": 2}, session=fresh.session)
    assert (await here.ended(run_id)).result == {"n": 2}


async def test_no_transaction_is_open_until_the_body_uses_its_session(here: LocalInstance) -> None:
    # Not 'active': a service of the instance may read the keys at the same time, in a statement of its own.
    busy = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE %s AND state LIKE 'idle in transaction%%'"
    async with once("lazy", "k") as fresh:
        assert await here.sql(busy, "%once_keys%") == [(0,)]
        await fresh.session.execute(text("SELECT 'lazily'"))
        assert await here.sql(busy, "%lazily%") == [(1,)]


async def test_an_effect_whose_connection_breaks_before_the_mark_is_written_once_in_the_end(
    here: LocalInstance,
) -> None:
    async def process() -> None:
        async with once("dies", "k") as fresh:
            await fresh.session.execute(NOTE, {"note": "dies"})
            if not await here.sql("SELECT 1 FROM effects WHERE note = 'dies before'"):
                await here.sql("INSERT INTO effects (note) VALUES ('dies before')")
                pid = (await fresh.session.execute(text("SELECT pg_backend_pid()"))).scalar_one()
                await here.sql("SELECT pg_terminate_backend(%s)", pid)

    with pytest.raises((DBAPIError, psycopg.Error)):
        await process()
    assert await count_notes(here, "dies") == 0
    await soon(lambda: is_released(here, "dies"))
    await process()
    assert (await states(here, "dies"), await count_notes(here, "dies")) == ({"k": "seen"}, 1)


async def is_released(here: LocalInstance, scope: str) -> bool:
    return await states(here, scope) == {"k": "free"}


async def test_a_key_is_pending_within_its_own_block(here: LocalInstance) -> None:
    async with once("nested", "k") as outer:
        async with once("nested", "k") as inner:
            assert inner.state == "pending"
        assert outer
    assert await states(here, "nested") == {"k": "seen"}


async def test_of_many_tasks_of_one_instance_one_gets_the_key() -> None:
    async def process() -> str:
        async with once("tasks", "k") as fresh:
            await asyncio.sleep(0.01)
        return fresh.state

    found = await asyncio.gather(*(process() for _ in range(20)))
    assert found.count("new") == 1


# -- outages and lost responses ---------------------------------------------------------------------------------------


async def test_a_body_fails_during_an_outage_and_its_key_is_released_after_it(
    here: LocalInstance,
) -> None:
    database = here.running.context.database

    async def use_session_during_an_outage() -> None:
        async with once("away", "k") as fresh:
            database._supervisor._healthy.clear()
            await fresh.session.execute(NOTE, {"note": "away"})

    with pytest.raises(DatabaseAway):
        await use_session_during_an_outage()
    database._supervisor._healthy.set()
    await soon(lambda: is_released(here, "away"))


@pytest.mark.parametrize("error", [psycopg.OperationalError, asyncio.CancelledError])
async def test_keys_are_released_if_the_response_to_taking_them_is_lost(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    genuine = statements.fetch

    async def lose_response(connection: Any, statement: bytes, values: Any = None) -> Any:
        rows = await genuine(connection, statement, values)
        if b"taken" in statement:
            raise error
        return rows

    scope = f"lost-{error.__name__}"
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "fetch", lose_response)
        with pytest.raises(error):
            await fail(scope, ValueError)
    await soon(lambda: is_released(here, scope))


# -- many keys --------------------------------------------------------------------------------------------------------


async def test_a_batch_sorts_its_keys_into_fresh_pending_and_seen_in_the_given_order(here: LocalInstance) -> None:
    async with once("batch", "seen-1"), once("batch", "seen-2"):
        pass
    async with once("batch", "held"), once_many("batch", ["c", "seen-2", "a", "held", "seen-1", "c", "b"]) as batch:
        assert (batch.fresh, batch.pending, batch.seen) == (["c", "a", "b"], ["held"], ["seen-2", "seen-1"])
    assert set((await states(here, "batch")).values()) == {"seen"}


async def test_the_keys_of_a_batch_become_seen_together_with_its_effects(here: LocalInstance) -> None:
    async with once_many("batch-session", [f"k-{number}" for number in range(1000)]) as batch:
        for key in batch.fresh[:3]:
            await batch.session.execute(NOTE, {"note": f"batch {key}"})
    assert list((await states(here, "batch-session")).values()) == ["seen"] * 1000
    assert await count_notes(here, "batch k-2") == 1


async def test_a_batch_that_fails_releases_its_own_keys_and_no_others(here: LocalInstance) -> None:
    async def fail_in_batch() -> None:
        async with once_many("batch-fails", ["a", "b", "held"]):
            raise ValueError

    async with once("batch-fails", "held"):
        with pytest.raises(ValueError):  # noqa: PT011 — ours has no text
            await fail_in_batch()
        assert await states(here, "batch-fails") == {"a": "free", "b": "free", "held": "pending"}


async def test_an_empty_batch_executes_no_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(blocks, "fetch")
    async with once_many("nothing", []) as batch:
        assert (batch.fresh, batch.pending, batch.seen) == ([], [], [])


# -- retention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "kept"), [({}, 7 * 86400.0), ({"keep": "90s"}, 90.0), ({"keep": 366 * 86400}, None)])
async def test_a_seen_key_expires_after_the_time_that_keep_gives(
    here: LocalInstance, keep: dict[str, Any], kept: float | None
) -> None:
    scope = f"keep-{kept}"
    async with once(scope, "k", **keep):
        pass
    ((left,),) = await here.sql("SELECT expires_at - clock_timestamp() FROM once_keys WHERE scope = %s", scope)
    assert timedelta(0) <= timedelta(seconds=kept or 366 * 86400) - left < timedelta(seconds=20)


async def test_an_expired_key_is_fresh_again_even_before_it_is_pruned(here: LocalInstance) -> None:
    async with once("expires", "k", keep="1s"):
        pass
    await here.sql("UPDATE once_keys SET expires_at = now() WHERE scope = 'expires'")
    async with once("expires", "k") as again:
        assert again


async def test_the_leader_prunes_expired_keys(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruner, "INTERVAL", 0.05)
    monkeypatch.setattr(pruner, "BATCH", 400)
    async with local_instance(address) as own:
        async with once_many("forgotten", [f"k-{number}" for number in range(1000)]):
            pass
        await own.sql("UPDATE once_keys SET expires_at = now() - interval '2 min' WHERE key <> 'k-0'")
        await soon(lambda: own.sql("SELECT 1 WHERE (SELECT count(*) FROM once_keys) = 1"))


# -- misuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (lambda: once("", "k"), "a scope must be a text of 1 to 100 printable characters, and not ''"),
        (lambda: once("s" * 101, "k"), "a scope must be a text of 1 to 100"),
        (lambda: once("s\n", "k"), r"a scope must be a text of .*, and not 's\\n'"),
        (lambda: once("s", ""), "a key must be a text of 1 to 500 printable characters, and not ''"),
        (lambda: once("s", "k" * 501), "a key must be a text of 1 to 500"),
        (lambda: once("s", "a\x00b"), "a key must be a text of"),
        (lambda: once("s", "\ud800"), "a key must be a text of"),
        (lambda: once("s", 17), "a key must be a text of .*, and not 17"),  # type: ignore[arg-type]
        (lambda: once_many("s", "abc"), "`keys` must be a list of texts, and not one text"),
        (
            lambda: once_many("s", [str(n) for n in range(1001)]),
            "1001 keys are too many for one block; the maximum is 1000",
        ),
        (lambda: once("s", "k", keep=0), "`keep` is 0 s, and must be from 1s to 366d"),
        (lambda: once("s", "k", keep="367d"), "`keep` is .* s, and must be from 1s to 366d"),
        (lambda: once("s", "k", keep=float("nan")), "`keep` is nan s"),
        (lambda: once("s", "k", keep="soon"), "`keep`: 'soon' is not a duration"),
    ],
)
async def test_invalid_arguments_of_once_are_refused_and_no_key_is_taken(
    here: LocalInstance, block: Callable[[], AbstractAsyncContextManager[Any]], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        await enter(block)
    assert await states(here, "s") == {}


async def enter(block: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
    async with block():
        pass


async def test_the_longest_allowed_scope_and_key_fit_the_index() -> None:
    chance = random.Random(4)
    # Characters of four bytes each, in an order that cannot be compressed.
    scope, key = ("".join(chr(chance.randrange(0x20000, 0x2A000)) for _ in range(length)) for length in MAX_LENGTHS)
    async with once(scope, key) as fresh:
        assert fresh


@pytest.mark.parametrize("block", [lambda: once("s", "k"), lambda: once_many("s", ["k"])])
async def test_once_outside_of_a_running_service_raises_an_error_that_says_where_it_works(
    block: Callable[[], AbstractAsyncContextManager[Any]],
) -> None:
    with pytest.raises(FleetError, match="for the code of a running service: a route, or an async action"):
        await asyncio.create_task(enter(block), context=contextvars.Context())


async def test_a_block_without_the_key_has_no_session() -> None:
    async with once("sessions", "k") as outer, once("sessions", "k") as inner:
        with pytest.raises(EngineError, match="check `fresh` first"):
            inner.session  # noqa: B018 — the access is the test
    with pytest.raises(EngineError, match="the block of this session has ended"):
        outer.session  # noqa: B018 — likewise


async def test_an_instance_that_is_not_registered_takes_no_key(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here.running.context.member.link, "_identity", None)
    with pytest.raises(Fenced, match="is registering again"):
        await enter(lambda: once("nobody", "k"))


# -- in a route -------------------------------------------------------------------------------------------------------


async def test_the_owner_of_a_key_in_a_route_is_the_instance(here: LocalInstance) -> None:
    answers = [(await here.running.client.post("/trial/once/k")).json() for _ in range(2)]
    assert answers == ["new", "seen"]
    identity = here.running.context.member.identity
    assert identity is not None
    assert await here.sql("SELECT instance_id, run_id FROM once_keys WHERE scope = 'route'") == [(identity.id, None)]


async def test_an_invalid_key_in_a_route_is_answered_with_422(here: LocalInstance) -> None:
    answer = await here.running.client.post(f"/trial/once/{'k' * 501}")
    assert answer.status_code == 422
    assert "a key must be a text of 1 to 500 printable characters" in answer.json()["detail"]


# -- in an attempt ----------------------------------------------------------------------------------------------------


async def test_the_owner_of_a_key_in_an_attempt_is_the_attempt(here: LocalInstance, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    run_id = await here.trigger("sift", {"key": "owned", "gate": str(gate)})
    run = await here.attempt(run_id)
    owner = "SELECT run_id, run_token FROM once_keys WHERE scope = 'sift' AND key = 'owned'"
    assert await soon(lambda: here.sql(owner)) == [(run_id, run.token)]
    gate.touch()
    assert (await here.ended(run_id)).result == "new"


async def test_the_next_attempt_processes_a_key_of_a_failed_attempt(here: LocalInstance) -> None:
    run = await here.run("sift", {"key": "fails", "fail": True})
    assert (run.result, run.attempt) == ("new", 2)
    assert await here.sql("SELECT attempt FROM effects WHERE run_id = %s", run.id) == [(2,)]
    assert (await here.run("sift", {"key": "fails"})).result == "seen"


async def test_an_attempt_whose_run_was_taken_over_is_fenced_and_has_no_effect(
    here: LocalInstance, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    run_id = await here.trigger("sift", {"key": "late", "gate": str(gate)})
    await soon(lambda: here.sql("SELECT 1 FROM once_keys WHERE scope = 'sift' AND key = 'late'"))
    fenced = here.engine.executor.writer.fenced
    before = fenced["once"]
    with here.without_comparison():
        await here.sql("UPDATE runs SET token = token + 1 WHERE id = %s", run_id)
        async with once("sift", "late") as ours:
            assert ours, "the key of the former attempt is free at once"
            gate.touch()
            await soon(lambda: here.sql("SELECT 1 WHERE %s", fenced["once"] == before + 1))
    assert await here.sql("SELECT 1 FROM effects WHERE run_id = %s", run_id) == []


async def test_a_key_is_seen_even_if_its_block_has_completed_the_run(here: LocalInstance) -> None:
    run = await here.run("end-inside")
    assert run.state == "succeeded"
    await soon(lambda: here.sql("SELECT 1 FROM once_keys WHERE scope = 'end-inside' AND state = 'seen'"))
