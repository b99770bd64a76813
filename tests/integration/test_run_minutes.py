"""The table `run_minutes`: it counts every attempt at most once, and writing it delays nothing."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace

import psycopg
import pytest

from app.fleet.db.server_clock import ServerClock
from app.fleet.engine.engine import Engine
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.figures import run_minutes
from app.fleet.engine.figures.run_minutes import RunMinutes
from app.fleet.errors import DatabaseError
from tests.integration.test_audit import logged
from tests.support.proxy import Proxy
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio

OUTCOMES = """
SELECT a.name, sum(succeeded)::int, sum(failed)::int, sum(cancelled)::int, sum(retried)::int, sum(paused)::int,
       sum(begun)::int
FROM run_minutes AS m
JOIN actions AS a ON a.id = m.action_id
GROUP BY a.name
"""


@pytest.fixture(autouse=True)
def no_flush_but_those_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_minutes, "INTERVAL", 3600.0)
    # On a busy machine, a statement may take longer than a second.
    monkeypatch.setattr(run_minutes, "LIMIT_TIME", "SELECT 1")


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address) as own:
        yield own


@pytest.fixture
async def proxied(address: str) -> AsyncIterator[tuple[LocalInstance, Proxy]]:
    """An instance, and the proxy between its pool and PostgreSQL."""
    port = int(address.rpartition("/")[0].rpartition(":")[2])
    with Proxy(("127.0.0.1", port)) as proxy:
        pool = address.replace(f":{port}/", f":{proxy.port}/")
        async with local_instance(pool, database_direct_url=address) as own:
            yield own, proxy


async def flushed(engine: Engine) -> None:
    """Flush what has ended so far."""
    await engine.executor.writer.empty()
    await engine.minutes.flush()


async def counted(here: LocalInstance) -> dict[str, tuple[int, ...]]:
    return {name: tuple(counts) for name, *counts in await here.sql(OUTCOMES)}


async def test_every_outcome_of_runs_on_two_instances_is_counted_once(address: str) -> None:
    async with local_instance(address) as first, local_instance(address) as second:
        runs = [await each.trigger("fail") for each in (first, second) for _ in range(3)]
        runs += await first.trigger_all([Order("noop")] * 40)
        runs += [await second.trigger("give-up")]
        for run_id in runs:
            await first.ended(run_id)
        cancelled = await first.trigger("nap", {"seconds": 3600})
        await first.until(cancelled, "running")
        await first.running.client.post(f"/runs/{cancelled}/cancel")
        await first.ended(cancelled)
        for _ in range(2):
            await asyncio.gather(flushed(first.engine), flushed(second.engine))
        assert await counted(first) == {
            "fail": (0, 6, 0, 12, 0, 6),
            "give-up": (0, 1, 0, 0, 0, 1),
            "nap": (0, 0, 1, 0, 0, 1),
            "noop": (40, 0, 0, 0, 0, 40),
        }
        figures = (
            "SELECT work_seconds, waited_seconds, longest_wait_seconds, begun, minute = date_trunc('minute', minute)"
        )
        for work, waited, longest, begun, is_minute in await first.sql(f"{figures} FROM run_minutes WHERE begun > 0"):
            assert work > 0
            assert 0 <= longest <= waited <= longest * begun
            assert is_minute


async def test_an_instance_without_runs_sends_nothing(here: LocalInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    database = here.running.context.database
    monkeypatch.setattr(database, "connection", None)
    await here.engine.minutes.flush()


# -- failures ---------------------------------------------------------------------------------------------------------


async def test_a_flush_whose_answer_is_lost_is_not_repeated(
    proxied: tuple[LocalInstance, Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    here, proxy = proxied
    await here.run("noop")
    await here.engine.executor.writer.empty()
    proxy.withhold_answer(b"run_minutes", b"COMMIT")
    with pytest.raises(psycopg.OperationalError):
        await here.engine.minutes.flush()
    assert proxy.sprung.is_set()
    (lost,) = logged(caplog, "minutes.lost")
    assert lost["attempts"] == 1
    await here.wait_until_healthy()
    await flushed(here.engine)
    assert (await counted(here))["noop"] == (1, 0, 0, 0, 0, 1), "it was committed, and not added a second time"


async def test_a_flush_that_breaks_before_its_commit_is_repeated(proxied: tuple[LocalInstance, Proxy]) -> None:
    here, proxy = proxied
    await here.run("noop")
    await here.engine.executor.writer.empty()
    proxy.withhold_answer(b'INSERT INTO "flotilla".run_minutes')
    with pytest.raises(psycopg.OperationalError):
        await here.engine.minutes.flush()
    assert proxy.sprung.is_set()
    await here.wait_until_healthy()
    await flushed(here.engine)
    assert (await counted(here))["noop"] == (1, 0, 0, 0, 0, 1)


async def test_an_outage_keeps_the_counts_for_their_minute(proxied: tuple[LocalInstance, Proxy]) -> None:
    here, proxy = proxied
    await here.run("noop")
    await here.engine.executor.writer.empty()
    (minutes,) = {minute for minute, _ in here.engine.minutes.counts._pairs}
    proxy.refuse()
    proxy.cut()
    for _ in range(2):
        with pytest.raises((psycopg.Error, DatabaseError)):
            await here.engine.minutes.flush()
    proxy.heal()
    await here.wait_until_healthy()
    here.engine.clock.at += timedelta(minutes=5)
    await flushed(here.engine)
    assert await here.sql("SELECT minute, succeeded FROM run_minutes") == [(minutes, 1)]


async def test_a_locked_row_delays_only_the_flush(here: LocalInstance, address: str) -> None:
    await here.run("noop")
    await flushed(here.engine)
    async with await psycopg.AsyncConnection.connect(address) as other:
        await other.execute("SELECT FROM flotilla.run_minutes FOR UPDATE")
        await here.run("noop")
        await here.engine.executor.writer.empty()
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await here.engine.minutes.flush()
        await here.run("noop")
    await flushed(here.engine)
    assert (await counted(here))["noop"] == (3, 0, 0, 0, 0, 3)


async def test_a_flush_locks_rows_in_the_order_of_their_key(
    here: LocalInstance, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two flushes that lock the same rows in different orders could wait for each other."""
    monkeypatch.setattr(run_minutes, "LIMIT_LOCKS", "SELECT 1")
    counts = here.engine.minutes.counts
    for action_id in (1, 2, 2, 1):
        counts.ended(action_id, "succeeded", 1, 0)
    await here.engine.minutes.flush()
    for action_id in (2, 1):
        counts.ended(action_id, "succeeded", 1, 0)
    async with await psycopg.AsyncConnection.connect(address) as other:
        await other.execute("SELECT FROM flotilla.run_minutes WHERE action_id = 1 FOR UPDATE")
        flushing = asyncio.create_task(here.engine.minutes.flush())
        await soon(partial(waits_for_a_lock, here))
        await other.execute("SELECT FROM flotilla.run_minutes WHERE action_id = 2 FOR UPDATE NOWAIT")
    await flushing
    assert await here.sql("SELECT succeeded FROM run_minutes") == [(3,), (3,)]


async def waits_for_a_lock(here: LocalInstance) -> bool:
    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%run_minutes%'"
    return await here.sql(waiting) != []


async def test_the_ordered_shutdown_writes_what_was_counted_and_what_it_interrupts(address: str) -> None:
    async with local_instance(address, role="web") as watching:
        async with local_instance(address, role="worker") as leaving:
            await leaving.run("noop")
            await leaving.until(await leaving.trigger("nap", {"seconds": 3600}), "running")
            assert await counted(watching) == {}
        assert await counted(watching) == {"noop": (1, 0, 0, 0, 0, 1), "nap": (0, 0, 0, 0, 1, 1)}


# -- the leader -------------------------------------------------------------------------------------------------------


async def test_the_leader_writes_the_backlog_of_each_action_with_one_and_of_all(here: LocalInstance) -> None:
    await here.engine.dispatcher.stop()
    minutes = here.engine.minutes
    await soon(lambda: is_early_in_a_minute(here), every=0.5)
    await minutes.add_backlog()
    backlog = (
        "SELECT coalesce(a.name, m.action_id::text), m.waiting::int, m.oldest_seconds >= 10 "
        "FROM run_minutes AS m LEFT JOIN actions AS a ON a.id = m.action_id ORDER BY 1"
    )
    assert await here.sql(backlog) == [("0", 0, False)], "the backlog was read, and there was none"
    for name in ("noop", "noop", "echo"):
        await here.trigger(name)
    await here.sql("UPDATE runs SET run_at = run_at - interval '10 s' WHERE id = 1")
    await minutes.add_backlog()
    assert await here.sql(backlog) == [("0", 3, True), ("echo", 1, False), ("noop", 2, True)]
    await here.sql("DELETE FROM runs")
    await minutes.add_backlog()
    assert len(await here.sql(backlog)) == 3
    assert (await here.sql(backlog))[0] == ("0", 3, True), "the highest of a minute stays, if two leaders write"


async def is_early_in_a_minute(here: LocalInstance) -> bool:
    """Whether the next statements will be in the same minute."""
    ((is_early,),) = await here.sql("SELECT extract(second FROM clock_timestamp()) < 45")
    return bool(is_early)


async def test_only_the_leader_writes_the_backlog_and_once_a_minute(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, clock, reads = SimpleNamespace(leading=False), ServerClock(), list[bool]()
    clock.learn(datetime(2026, 11, 20, 12, tzinfo=UTC), asyncio.get_running_loop().time())
    minutes = RunMinutes(here.running.context.database, member, clock)  # type: ignore[arg-type]

    async def add_backlog() -> None:
        reads.append(member.leading)

    monkeypatch.setattr(run_minutes, "INTERVAL", 0.01)
    monkeypatch.setattr(minutes, "add_backlog", add_backlog)
    await minutes.start()
    for count in (0, 1, 2):
        await soon(partial(has, reads, count))
        # Time for a read too many.
        await asyncio.sleep(0.1)
        assert reads == [True] * count
        clock.at += timedelta(minutes=1)
        member.leading = True
    await minutes.stop()


async def has(reads: list[bool], count: int) -> bool:
    return len(reads) == count


async def test_the_minutes_of_more_than_a_day_ago_are_deleted_in_batches(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.engine.maintenance.pruner.BATCH", 3)
    await here.sql(
        "INSERT INTO run_minutes (minute, action_id, succeeded) "
        "SELECT date_trunc('minute', now()) - make_interval(hours => n), 1, 1 FROM generate_series(20, 35) AS n"
    )
    await here.engine.pruner.prune_minutes()
    ((kept, oldest),) = await here.sql("SELECT count(*)::int, (now() - min(minute)) < '26 hours' FROM run_minutes")
    assert oldest
    assert kept in {5, 6}
