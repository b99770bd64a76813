"""Locks: one holder at a time, in order, each with a new token; and the end of a holder that has lost its lock."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from contextvars import Context
from typing import Any

import psycopg
import pytest

from app.fleet import FleetError, HeldLock, LockCycle, LockLost, LockTaken, lock
from app.fleet.cluster import leader
from app.fleet.cluster.registry import BATCH, Identity
from app.fleet.coordination.locks import admin, renewal
from app.fleet.coordination.locks.held import LockRequest
from app.fleet.coordination.locks.lock import Locks
from app.fleet.coordination.locks.statements import ENTER_QUEUE, RELEASE, RENEW, TAKE
from app.fleet.db.direct import PATIENCE, open_session
from app.fleet.db.namespace import Statement
from app.fleet.errors import LockInvalid
from tests.support.postgres import Postgres
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    """One instance; the functions of service code use its locks in the test."""
    async with local_instance(address) as own:
        own.engine.enter()
        yield own


@pytest.fixture
async def there(address: str, here: LocalInstance) -> AsyncIterator[LocalInstance]:
    """Another instance."""
    async with local_instance(address) as other:
        # Otherwise, service code would use the instance that started last.
        here.engine.enter()
        yield other


def at(instance: LocalInstance, work: Callable[[], Awaitable[Any]]) -> "asyncio.Task[Any]":
    """Call a function on this instance, in a task with a new context, which holds no locks."""

    async def enter() -> Any:
        instance.engine.enter()
        return await work()

    return asyncio.create_task(enter(), context=Context())


async def hold(name: str, until: asyncio.Event, **options: Any) -> int:
    """Hold a lock until the event is set; return its token."""
    async with lock(name, **options) as held:
        await until.wait()
        return held.token


def locks_of(instance: LocalInstance) -> Locks:
    return instance.running.context.coordination.locks


def identity(instance: LocalInstance) -> Identity:
    me = instance.running.context.member.identity
    assert me is not None
    return me


async def row(instance: LocalInstance, name: str = "x") -> tuple[int | None, int]:
    """Return the instance that holds a lock, and the token."""
    rows = await instance.sql("SELECT instance_id, token FROM service_locks WHERE name = %s", name)
    return rows[0][0], rows[0][1]


async def wait_until_held_by(instance: LocalInstance, name: str = "x") -> None:
    async def check() -> bool:
        rows = await instance.sql("SELECT instance_id FROM service_locks WHERE name = %s", name)
        return rows == [(identity(instance).id,)]

    await soon(check)


async def wait_for_waiters(instance: LocalInstance, count: int) -> None:
    async def check() -> bool:
        return await instance.sql("SELECT count(*) FROM lock_waiters") == [(count,)]

    await soon(check)


# A statement that takes a lock, and not the heartbeat, which may wait for the same row.
WAITS_FOR_A_ROW = """
SELECT 1 FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%INSERT INTO "flotilla".service_locks%'
"""


async def find_no_grant(_: object) -> None:
    """Poll without a result, so that only a notification can grant a lock."""


# -- one holder at a time ---------------------------------------------------------------------------------------------


async def test_a_lock_has_one_holder_at_a_time_and_each_gets_a_higher_token(address: str) -> None:
    inside = maximum = 0
    tokens: list[int] = []

    async def once() -> None:
        nonlocal inside, maximum
        async with lock("x") as held:
            inside += 1
            maximum = max(maximum, inside)
            tokens.append(held.token)
            await asyncio.sleep(0.001)
            inside -= 1

    async with AsyncExitStack() as stack:
        fleet = [await stack.enter_async_context(local_instance(address)) for _ in range(3)]
        await asyncio.gather(*(at(fleet[number % 3], once) for number in range(30)))
    assert maximum == 1
    assert tokens == list(range(1, 31))


async def test_waiters_are_granted_the_lock_in_the_order_of_their_requests(here: LocalInstance) -> None:
    order: list[int] = []

    async def queue(number: int) -> None:
        async with lock("x"):
            order.append(number)

    tasks = []
    async with lock("x"):
        for number in range(5):
            tasks.append(at(here, lambda number=number: queue(number)))  # type: ignore[misc]
            await wait_for_waiters(here, number + 1)
    await asyncio.gather(*tasks)
    assert order == list(range(5))


async def test_a_new_caller_does_not_take_a_free_lock_that_has_a_waiter(here: LocalInstance) -> None:
    await here.sql("INSERT INTO service_locks (name, token) VALUES ('x', 7)")
    await here.sql(
        "INSERT INTO lock_waiters (name, instance_id, ttl, held) VALUES ('x', %s, interval '10s', '{}')",
        identity(here).id,
    )
    assert await locks_of(here)._take(LockRequest("x", 10, None), identity(here)) is None


async def test_a_released_lock_is_granted_to_another_instance(here: LocalInstance, there: LocalInstance) -> None:
    over = asyncio.Event()
    holder = asyncio.create_task(hold("x", over))
    await wait_until_held_by(here)
    next_one = at(there, lambda: hold("x", over))
    await wait_for_waiters(here, 1)
    over.set()
    assert (await holder, await next_one) == (1, 2)


async def test_a_held_lock_is_refused_without_wait_and_the_error_names_its_holder(
    here: LocalInstance, there: LocalInstance
) -> None:
    async def now() -> None:
        async with lock("x", wait=0):
            pytest.fail("it is held")

    async with lock("x"):
        with pytest.raises(LockTaken, match=f"not free at once. It is held by {identity(here).name}"):
            await at(there, now)


async def test_a_caller_whose_wait_has_timed_out_is_refused_and_leaves_the_queue(here: LocalInstance) -> None:
    async def briefly() -> None:
        async with lock("x", wait="200ms"):
            pytest.fail("it is held")

    async with lock("x"):
        with pytest.raises(LockTaken, match="not free within 200ms"):
            await at(here, briefly)
        await wait_for_waiters(here, 0)
    assert locks_of(here).waiting == 0


async def test_a_lock_granted_to_a_cancelled_waiter_is_granted_to_the_next(here: LocalInstance) -> None:
    over = asyncio.Event()
    async with lock("x"):
        gives_up = at(here, lambda: hold("x", over))
        await wait_for_waiters(here, 1)
        stays = at(here, lambda: hold("x", over))
        await wait_for_waiters(here, 2)
        # The first waiter does not learn that it was granted the lock, and is then cancelled.
        queue = locks_of(here)._queue
        queue.waiters[min(queue.waiters)].grant = lambda token: None  # type: ignore[method-assign]  # noqa: ARG005
    await wait_until_held_by(here)
    gives_up.cancel()
    over.set()
    assert await asyncio.wait_for(stays, 60) == 3


async def test_a_grant_whose_notification_was_lost_is_found_by_polling(here: LocalInstance) -> None:
    over = asyncio.Event()
    locks_of(here)._member._listeners.pop("granted")
    async with lock("x"):
        without_notification = at(here, lambda: hold("x", over))
        await wait_for_waiters(here, 1)
    over.set()
    assert await asyncio.wait_for(without_notification, 60) == 2


async def test_a_waiter_whose_grant_expired_unnoticed_queues_again(here: LocalInstance) -> None:
    """It was granted the lock while its link was broken, and the `ttl` expired: its row in the queue is gone."""
    over = asyncio.Event()
    over.set()
    async with lock("x"):
        passed_over = at(here, lambda: hold("x", over))
        await wait_for_waiters(here, 1)
        await here.sql("DELETE FROM lock_waiters")
        locks_of(here)._linked()
        await wait_for_waiters(here, 1)
    assert await asyncio.wait_for(passed_over, 60) == 2


# -- deadlocks --------------------------------------------------------------------------------------------------------


async def test_a_task_that_requests_a_lock_that_it_holds_is_refused_at_once(here: LocalInstance) -> None:
    async with lock("x"):
        with pytest.raises(LockCycle, match="this task holds the lock 'x' already"):
            async with lock("x"):
                pytest.fail("it waited for itself")
    assert (await row(here))[0] is None


async def test_a_task_may_take_a_lock_again_after_its_release(here: LocalInstance) -> None:
    async with lock("x"):
        pass
    async with lock("x") as held:
        assert held.token == 2
    assert here


async def test_of_two_tasks_that_take_two_locks_in_opposite_orders_the_newer_waiter_fails(
    here: LocalInstance, there: LocalInstance
) -> None:
    both = asyncio.Barrier(2)

    async def cross(first: str, second: str) -> str:
        async with lock(first):
            await both.wait()
            async with lock(second):
                return "had both"

    both_ways = [at(here, lambda: cross("a", "b")), at(there, lambda: cross("b", "a"))]
    ends = await asyncio.wait_for(asyncio.gather(*both_ways, return_exceptions=True), 60)
    (error,) = [end for end in ends if isinstance(end, LockCycle)]
    assert re.search("this task holds '(a|b)' and waits for '(a|b)', whose holder waits for this task", str(error))
    assert "had both" in ends


# -- guarding ---------------------------------------------------------------------------------------------------------


async def test_a_holder_that_has_lost_its_lock_commits_no_guarded_transaction(here: LocalInstance) -> None:
    await here.sql("CREATE TABLE public.effects (token bigint)")
    database = here.running.context.database
    with pytest.raises(LockLost, match="no longer held with the token 1"):
        async with lock("x", on_loss="tell") as held:
            await here.sql("UPDATE service_locks SET token = 2 WHERE name = 'x'")
            async with database.session() as session:
                await session.connection()
                await (await session.connection()).exec_driver_sql("INSERT INTO public.effects VALUES (1)")
                await held.guard(session)
    assert await here.sql("SELECT * FROM public.effects") == []
    assert locks_of(here).refused == 1


async def test_a_lock_is_not_granted_before_a_guarded_transaction_has_ended(
    here: LocalInstance, there: LocalInstance
) -> None:
    """A transaction may outlive the block, as a route's does: the release does not wait for it, the grant does."""
    over = asyncio.Event()
    over.set()
    async with here.running.context.database.connection() as connection:
        async with lock("x") as held:
            await held.guard(connection)
        next_one = at(there, lambda: hold("x", over))
        await wait_for_waiters(here, 1)
        await asyncio.sleep(0.5)
        assert not next_one.done()
    assert await asyncio.wait_for(next_one, 60) == 2


async def test_a_lock_released_during_a_guarded_transaction_is_granted_at_its_end(
    here: LocalInstance, there: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The releasing instance grants it: the waiters poll too rarely."""
    over = asyncio.Event()
    over.set()
    monkeypatch.setattr(locks_of(there)._queue, "_poll", find_no_grant)
    async with here.running.context.database.connection() as connection, lock("x") as held:
        next_one = at(there, lambda: hold("x", over))
        await wait_for_waiters(here, 1)
        await held.guard(connection)
    assert await asyncio.wait_for(next_one, 60) == 2


async def test_a_renewal_does_not_wait_for_a_guarded_transaction(here: LocalInstance) -> None:
    async with lock("x", ttl="1h") as held, here.running.context.database.connection() as connection:
        await held.guard(connection)
        before = held.expires_at

        async def renewed() -> bool:
            return held.expires_at > before

        await soon(renewed)
        assert held.active


# -- losing it --------------------------------------------------------------------------------------------------------


async def test_a_lock_that_is_not_renewed_is_free_after_its_ttl(here: LocalInstance, there: LocalInstance) -> None:
    over = asyncio.Event()
    over.set()
    locks_of(here)._member._heartbeat_hooks.clear()
    with pytest.raises(LockLost, match="not renewed in time"):
        async with lock("x", ttl="3s"):
            next_one = at(there, lambda: hold("x", over))
            await asyncio.sleep(60)
    assert await asyncio.wait_for(next_one, 60) == 2


async def test_a_lock_that_its_living_holder_does_not_know_is_free_after_its_ttl(here: LocalInstance) -> None:
    forgotten = (
        "INSERT INTO service_locks (name, token, instance_id, expires_at) VALUES ('x', 7, %s, now() + interval '1s')"
    )
    await here.sql(forgotten, identity(here).id)
    async with lock("x", wait="60s") as held:
        assert held.token == 8


async def test_a_body_that_blocks_the_event_loop_keeps_its_lock(here: LocalInstance) -> None:
    # Twice as long as the heartbeats may be apart: on a busy machine, one may be late.
    async with lock("x", ttl="5s") as held:
        time.sleep(6)  # noqa: ASYNC251 — the mistake that is tested
        await asyncio.sleep(0.2)
        assert held.active
    assert (await row(here))[1] == 1


async def test_a_block_is_cancelled_when_its_lock_has_another_holder(here: LocalInstance) -> None:
    with pytest.raises(LockLost, match="'x', with the token 1, was lost: it was taken over"):
        async with lock("x"):
            await here.sql("UPDATE service_locks SET token = 2 WHERE name = 'x'")
            await asyncio.sleep(60)
    assert (await row(here))[1] == 2


async def test_with_on_loss_tell_a_block_is_not_cancelled(here: LocalInstance) -> None:
    async with lock("x", on_loss="tell") as held:
        await here.sql("UPDATE service_locks SET token = 2 WHERE name = 'x'")
        await asyncio.wait_for(held.lost.wait(), 60)
        assert held.why_lost == "it was taken over"


async def test_a_short_break_of_the_link_loses_no_lock(here: LocalInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "MAX_LINK_BREAK", 10.0)
    # On a busy machine, a new session takes longer than usual, and the leader would declare the instance gone.
    monkeypatch.setattr(leader, "GRACE", 10.0)
    member = here.running.context.member
    async with lock("x") as held:
        await here.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '%%/link/%%'"
        )

        async def again() -> bool:
            return member.link.relinks >= 1 and member.holds()

        await soon(again)
        before = held.expires_at

        async def renewed() -> bool:
            return held.expires_at > before

        await soon(renewed)
        assert held.active


async def test_a_block_is_cancelled_during_a_database_outage(own_postgres: Postgres) -> None:
    async with local_instance(own_postgres.new_database()) as own:
        own.engine.enter()
        with pytest.raises(LockLost, match="the link to PostgreSQL broke"):
            async with lock("x"):
                await asyncio.to_thread(own_postgres.stop, "immediate")
                await asyncio.sleep(60)
        await asyncio.to_thread(own_postgres.start_again)


async def test_an_instance_that_loses_its_identity_loses_its_locks_and_can_take_them_again(here: LocalInstance) -> None:
    former = identity(here)
    with pytest.raises(LockLost, match=r"this instance was declared gone|the link to PostgreSQL broke"):
        async with lock("x"):
            await here.sql("UPDATE instances SET state = 'gone', gone_at = now() WHERE id = %s", former.id)
            await asyncio.sleep(60)

    async def has_new_identity() -> bool:
        me = here.running.context.member.identity
        return me is not None and me != former and here.running.context.member.holds()

    await soon(has_new_identity)
    async with lock("x", wait="60s") as held:
        assert held.token == 2


async def test_a_lock_can_be_released_only_once(here: LocalInstance) -> None:
    held = await locks_of(here).take(LockRequest("x", 10, None), None)
    assert await locks_of(here).release(held)
    assert not await locks_of(here).release(held)


@pytest.mark.parametrize(("waiters", "durable"), [(0, "off"), (1, "on")])
async def test_a_release_waits_for_the_disk_if_it_grants_the_lock_to_a_waiter(
    here: LocalInstance, waiters: int, durable: str
) -> None:
    held = await locks_of(here).take(LockRequest("x", 10, None), None)
    for _ in range(waiters):
        await here.sql(
            "INSERT INTO lock_waiters (name, instance_id, ttl, held) VALUES ('x', %s, interval '10s', '{}')",
            identity(here).id,
        )
    database = here.running.context.database
    async with database.connection() as connection:
        values = {"name": "x", "token": held.token, "me": held.owner.id}
        await connection.execute(database.namespace.sql(RELEASE), values)
        shown = await (await connection.execute("SHOW synchronous_commit")).fetchone()
    assert shown == (durable,)


async def test_an_error_in_the_block_releases_the_lock_and_is_raised(here: LocalInstance) -> None:
    with pytest.raises(ZeroDivisionError):
        async with lock("x"):
            _ = 1 / 0
    assert (await row(here)) == (None, 1)


async def test_a_cancelled_block_releases_its_lock(here: LocalInstance) -> None:
    task = asyncio.create_task(hold("x", asyncio.Event()))
    await wait_until_held_by(here)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await row(here))[0] is None


async def test_a_caller_that_is_cancelled_before_the_response_holds_no_lock(here: LocalInstance) -> None:
    async with here.running.context.database.connection() as connection:
        # Until this transaction ends, no lock can be taken for this instance.
        await connection.execute("SELECT FROM flotilla.instances WHERE id = %s FOR UPDATE", [identity(here).id])
        impatient = asyncio.create_task(hold("x", asyncio.Event()))
        await soon(lambda: here.sql(WAITS_FOR_A_ROW))
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient

    async def released() -> bool:
        return await here.sql("SELECT instance_id, token FROM service_locks") == [(None, 1)]

    await soon(released)


async def test_declaring_an_instance_gone_grants_its_locks_and_deletes_its_waiters(
    here: LocalInstance, there: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = asyncio.Event()
    over.set()

    dead = identity(here).id
    address = here.running.context.member._addresses.direct
    async with lock("x", on_loss="tell"):
        behind = at(here, lambda: hold("x", over))
        await wait_for_waiters(here, 1)
        monkeypatch.setattr(locks_of(there)._queue, "_poll", find_no_grant)
        next_one = at(there, lambda: hold("x", over))
        await wait_for_waiters(here, 2)
        with psycopg.connect(address, autocommit=True) as session, session.transaction():
            await asyncio.to_thread(locks_of(here)._instance_died, session, [dead])
        assert await asyncio.wait_for(next_one, 60) == 2
        await wait_for_waiters(here, 0)
        behind.cancel()


async def test_locks_of_a_gone_instance_are_granted_in_batches(here: LocalInstance) -> None:
    await here.sql(
        "INSERT INTO service_locks (name, token, instance_id) SELECT n, 1, 99 FROM generate_series(1, %s) AS n",
        2 * BATCH + 500,
    )
    address = here.running.context.member._addresses.direct
    left = []
    with psycopg.connect(address, autocommit=True) as session:
        for _ in range(3):
            more = await asyncio.to_thread(locks_of(here)._instance_died, session, [99])
            ((held,),) = await here.sql("SELECT count(*) FROM service_locks WHERE instance_id = 99")
            left.append((more, held))
    assert left == [(True, BATCH + 500), (True, 500), (False, 0)]


async def test_a_lock_that_is_held_for_long_is_an_anomaly_until_it_is_released(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def anomalies() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await here.running.client.get("/health/instances")).json()["anomalies"]
        return found

    monkeypatch.setattr("app.fleet.cluster.anomalies.LATE_HEARTBEAT_MS", 60_000)
    await here.wait_for_leader()
    with pytest.raises(LockLost, match="an operator released it"):
        async with lock("x"):
            assert await anomalies() == []
            await here.sql("UPDATE service_locks SET acquired_at = now() - interval '11 minutes'")
            (anomaly,) = await anomalies()
            assert (anomaly["kind"], anomaly["subject"]) == ("lock_held_long", "x")
            assert f"{identity(here).name} has held this lock since" in anomaly["detail"]
            await here.running.client.delete("/locks/x", params={"reason": "it hangs"})
            assert await anomalies() == []
            await asyncio.sleep(60)
    assert await row(here) == (None, 2)


async def test_a_forced_release_waits_for_a_guarded_transaction_and_names_it_in_its_refusal(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "PATIENCE", "200ms")
    async with here.running.context.database.connection() as connection, lock("x") as held:
        await held.guard(connection)
        refused = await here.running.client.delete("/locks/x", params={"reason": "it hangs"})
        assert (refused.status_code, refused.json()["type"]) == (409, "/problems/locked")
        assert "guarded by the lock 'x' has been open for 200ms" in refused.json()["detail"]
        assert held.active
    assert await here.sql("SELECT * FROM lock_releases") == []


# -- orphaned rows ----------------------------------------------------------------------------------------------------

LONG = "1h"


class Outage:
    """Until its end, the lock statements of this instance fail, or the response to one of them is lost."""

    def __init__(self, instance: LocalInstance, monkeypatch: pytest.MonkeyPatch) -> None:
        self._fetch = locks_of(instance)._rows.fetch
        self._over = asyncio.Event()
        self._lost: set[str] = set()
        self.met = asyncio.Event()
        monkeypatch.setattr(locks_of(instance)._rows, "fetch", self._ask)

    def lose_answer(self, statement: str) -> None:
        """The statement commits, and its connection breaks before the answer is read; once."""
        self._over.set()
        self._lost.add(statement)

    def end(self) -> None:
        self._over.set()

    async def _ask(self, statement: Statement, values: Any) -> Any:
        if not self._over.is_set():
            self.met.set()
            raise psycopg.OperationalError("the database is away")
        answer = await self._fetch(statement, values)
        if statement in self._lost:
            self._lost.remove(statement)
            raise psycopg.OperationalError("the connection broke")
        return answer


async def wait_until_free(instance: LocalInstance, name: str = "x") -> None:
    async def check() -> bool:
        return await instance.sql("SELECT instance_id FROM service_locks WHERE name = %s", name) == [(None,)]

    await soon(check)


async def test_waiters_that_gave_up_during_an_outage_leave_the_queue_when_it_is_over(
    here: LocalInstance, there: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = asyncio.Event()
    holder = at(there, lambda: hold("x", over))
    await wait_until_held_by(there)
    waiters = [at(here, lambda: hold("x", over, ttl=LONG)) for _ in range(5)]
    await wait_for_waiters(here, 5)
    outage = Outage(here, monkeypatch)
    for each in waiters:
        each.cancel()
    await asyncio.wait(waiters)
    await outage.met.wait()
    outage.end()
    await wait_for_waiters(there, 0)
    over.set()
    await holder


async def test_a_lock_that_was_granted_to_an_unknown_waiter_is_released_at_once(
    here: LocalInstance, there: LocalInstance
) -> None:
    over = asyncio.Event()
    holder = at(there, lambda: hold("x", over))
    await wait_until_held_by(there)
    await here.sql(
        "INSERT INTO lock_waiters (name, instance_id, ttl, held) VALUES ('x', %s, interval '1 hour', '{}')",
        identity(here).id,
    )
    over.set()
    await holder
    await wait_until_free(here)
    assert (await row(here))[1] == 2, "the lock was never granted to another waiter"


@pytest.mark.parametrize("statement", [TAKE, ENTER_QUEUE], ids=["taken", "in the queue"])
async def test_a_lock_is_released_if_the_response_to_taking_it_is_lost(
    here: LocalInstance, there: LocalInstance, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    over = asyncio.Event()
    if statement is ENTER_QUEUE:
        holder = at(there, lambda: hold("x", over))
        await wait_until_held_by(there)
    Outage(here, monkeypatch).lose_answer(statement)
    with pytest.raises(psycopg.OperationalError):
        await at(here, lambda: hold("x", over, ttl=LONG))
    await wait_for_waiters(here, 0)
    over.set()
    if statement is ENTER_QUEUE:
        await holder
    await wait_until_free(here)


async def test_a_caller_that_is_cancelled_while_it_enters_the_queue_leaves_it_again(
    here: LocalInstance, there: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of the caller is committed, and the response is still in flight."""
    over, written, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
    holder = at(there, lambda: hold("x", over))
    await wait_until_held_by(there)
    fetch = locks_of(here)._rows.fetch

    async def answer_late(statement: Statement, values: Any) -> Any:
        answer = await fetch(statement, values)
        if statement is ENTER_QUEUE:
            written.set()
            await answered.wait()
        return answer

    monkeypatch.setattr(locks_of(here)._rows, "fetch", answer_late)
    impatient = at(here, lambda: hold("x", over, ttl=LONG))
    await written.wait()
    impatient.cancel()
    await asyncio.wait([impatient])
    answered.set()
    await wait_for_waiters(here, 0)
    over.set()
    await holder


async def test_a_release_that_could_not_be_written_is_written_after_the_outage(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lock("x", ttl=LONG):
        outage = Outage(here, monkeypatch)
    await outage.met.wait()
    assert (await row(here))[0] == identity(here).id
    outage.end()
    await wait_until_free(here)


async def test_known_locks_and_waiters_are_not_released_as_orphans(here: LocalInstance, there: LocalInstance) -> None:
    over = asyncio.Event()
    holder = at(there, lambda: hold("y", over))
    await wait_until_held_by(there, "y")
    async with lock("x", ttl=LONG) as held, lock("z", ttl=LONG, on_loss="tell") as lost:
        next_one = at(here, lambda: hold("y", over, ttl=LONG))
        await wait_for_waiters(here, 1)
        locks_of(here)._held.lose(lost, "the link to PostgreSQL broke")
        await locks_of(here)._rows.release_orphans()
        assert held.active
        assert await here.sql("SELECT name, token FROM service_locks WHERE instance_id = %s", held.owner.id) == [
            ("x", 1),
            ("z", 1),
        ]
        await wait_for_waiters(here, 1)
        over.set()
        assert (await holder, await next_one) == (1, 2)


async def test_rows_that_a_statement_in_flight_may_have_written_are_not_orphans_until_it_ends(
    here: LocalInstance,
) -> None:
    """They are deleted after that, even if another statement for the same lock is in flight."""
    own = locks_of(here)
    await here.sql(
        "INSERT INTO lock_waiters (name, instance_id, ttl, held) VALUES ('x', %s, interval '1 hour', '{}')",
        identity(here).id,
    )
    with ExitStack() as later:
        with own._rows.writing("x"):
            assert await own._rows.release_orphans()
            await wait_for_waiters(here, 1)
            later.enter_context(own._rows.writing("x"))
        assert await own._rows.release_orphans()
        await wait_for_waiters(here, 0)


# -- rows that another transaction has locked -------------------------------------------------------------------------


async def test_a_renewal_does_not_wait_for_a_row_that_an_operator_has_locked(here: LocalInstance) -> None:
    """Otherwise it would block the link's thread, and the instance would lose its link."""
    member = here.running.context.member
    async with here.running.context.database.connection() as operator, lock("x", ttl=LONG) as held:
        await operator.execute("SELECT FROM flotilla.service_locks WHERE name = 'x' FOR UPDATE")
        before = held.expires_at

        async def beaten() -> bool:
            ((later,),) = await here.sql("SELECT heartbeat_at > now() - interval '1 second' FROM instances")
            return bool(later) or member.link.breaks > 0

        # Longer than the link waits for an answer.
        await asyncio.sleep(PATIENCE + 1)
        await soon(beaten)
        assert member.link.breaks == 0
        assert held.active
        assert held.expires_at == before
        await operator.rollback()

        async def renewed() -> bool:
            return held.expires_at > before

        await soon(renewed)


async def test_a_waiter_keeps_the_lock_that_it_was_granted_while_another_session_has_locked_the_row(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poll of another waiter locks the row for a moment. The lock must not pass on to that waiter because of it."""
    rows, done, renewed = locks_of(here)._rows, asyncio.Event(), asyncio.Event()
    genuine = rows.fetch
    async with here.running.context.database.connection() as other:

        async def fetch(statement: Statement, values: Any) -> Any:
            if statement is not RENEW or renewed.is_set():
                return await genuine(statement, values)
            await other.execute("SELECT FROM flotilla.service_locks WHERE name = 'x' FOR UPDATE")
            answer = await genuine(statement, values)
            renewed.set()
            return answer

        monkeypatch.setattr(rows, "fetch", fetch)
        async with lock("x"):
            waiting = at(here, lambda: hold("x", done))
            await wait_for_waiters(here, 1)
        await renewed.wait()
        await other.rollback()
        done.set()
        assert await waiting == 2


async def test_an_instance_stops_granting_a_released_lock_that_has_another_holder(here: LocalInstance) -> None:
    """So the releasing instance stops trying to grant it."""
    async with here.running.context.database.connection() as connection:
        async with lock("x") as held:
            await held.guard(connection)
        assert locks_of(here)._rows.background
        await here.sql(
            "UPDATE service_locks SET token = 2, instance_id = 7, expires_at = now() + interval '1 hour' "
            "WHERE name = 'x'"
        )

        async def at_rest() -> bool:
            return not locks_of(here)._rows.background

        await soon(at_rest)


# -- cost, and two holders --------------------------------------------------------------------------------------------


async def anomalies(instance: LocalInstance) -> dict[str, str]:
    """Return the kinds and subjects of the anomalies."""
    view = (await instance.running.client.get("/health/instances")).json()
    return {each["kind"]: each["subject"] for each in view["anomalies"]}


async def test_a_lock_that_is_granted_while_it_is_held_is_reported_as_two_holders(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.cluster.anomalies.LATE_HEARTBEAT_MS", 60_000)
    await here.wait_for_leader()
    with pytest.raises(LockLost):
        async with lock("x"):
            # Rows must not be changed by hand.
            await here.sql("UPDATE service_locks SET token = token + 1, instance_id = 7, instance = 'flotilla-7'")
            await asyncio.sleep(60)
    assert await anomalies(here) == {"two_holders": "x"}
    assert await here.sql("SELECT token, instance, other_token, other FROM lock_overlaps") == [
        (1, "flotilla-1", 2, "flotilla-7")
    ]
    # The remedy, after the cause was found.
    await here.sql("DELETE FROM lock_overlaps WHERE name = 'x'")
    assert await anomalies(here) == {}
    with pytest.raises(LockLost):
        async with lock("y"):
            # A forced release changes the row like this; the notification is lost.
            await here.sql("""
                INSERT INTO lock_releases (name, token, instance, acquired_at, reason, released_by)
                VALUES ('y', 1, 'flotilla-1', now(), 'it hangs', 'ops')
            """)
            await here.sql("UPDATE service_locks SET token = 2, instance_id = 7 WHERE name = 'y'")
            await asyncio.sleep(60)
    assert await here.sql("SELECT * FROM lock_overlaps") == []


async def test_a_lock_that_expires_before_it_is_granted_again_is_not_reported_as_two_holders(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has expired by this machine's clock when the next holder is granted it, as intended."""
    # The loop sleeps, so that the next renewal is the first to detect the loss.
    monkeypatch.setattr(renewal, "CHECK_INTERVAL", 60.0)
    hooks = locks_of(here)._member._heartbeat_hooks
    renewals, hooks[:] = hooks[:], []
    with pytest.raises(LockLost):
        async with lock("x", ttl="3s") as held:
            held.expires_at -= 3
            await here.sql(
                "UPDATE service_locks SET token = 2, instance_id = 7, instance = 'b', acquired_at = clock_timestamp()"
            )
            # Only from now on: a renewal before that would find the lock not expired.
            hooks[:] = renewals
            await asyncio.sleep(60)
    assert await here.sql("SELECT * FROM lock_overlaps") == []


async def test_one_statement_renews_all_locks_of_an_instance(here: LocalInstance) -> None:
    own, member = locks_of(here), here.running.context.member
    held = [await own.take(LockRequest(f"x{number}", 3600, None), None) for number in range(200)]
    statements: list[str] = []

    class Counting(psycopg.Connection[tuple[Any, ...]]):
        def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
            statements.append(query.decode())
            return super().execute(query, *args, **kwargs)

    before = {each.name: each.expires_at for each in held}
    with Counting.connect(member._addresses.direct, autocommit=True) as session:
        await asyncio.to_thread(own._held.renew, session, identity(here))
    assert statements == [here.running.context.database.namespace.sql(RENEW).decode()]
    assert all(each.expires_at > before[each.name] and each.active for each in held)


async def test_an_instance_without_locks_sends_no_renewal(here: LocalInstance) -> None:
    with open_session(here.running.context.member._addresses.direct, application="test") as session:
        session.close()
        # A closed session raises at any statement.
        locks_of(here)._held.renew(session, identity(here))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "from 1 to 200 printable characters"),
        ({"name": "x" * 201}, "from 1 to 200 printable characters"),
        ({"name": "a\nb"}, "from 1 to 200 printable characters"),
        ({"name": "singleton:x"}, "are reserved for singletons"),
        ({"ttl": "1s"}, "must be from 3s to 1h"),
        ({"ttl": "2h"}, "must be from 3s to 1h"),
        ({"ttl": "soon"}, "`ttl`: 'soon' is not a duration"),
        ({"wait": -1}, "`wait` is -1 s, and must be from"),
        ({"on_loss": "ignore"}, "`on_loss` is 'ignore', and must be one of 'cancel', 'tell'"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_written(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LockInvalid, match=message):
        lock(**{"name": "x", **options})


async def test_a_lock_outside_of_a_running_service_raises() -> None:
    with pytest.raises(FleetError, match="in the code of a running service"):
        async with lock("x"):
            pytest.fail("the block was entered")


def test_the_repr_of_a_held_lock_has_its_name_and_token() -> None:
    assert repr(HeldLock(None, None, "x", 7, 10.0, 0.0)) == "<lock 'x', token 7>"  # type: ignore[arg-type]
