"""A due slot becomes one run, whatever the number of schedulers; options decide about missed and overlapping slots."""

import asyncio
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from app.fleet.db.namespace import Lock
from app.fleet.engine.actions.action import Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.synchronise import synchronise
from app.fleet.engine.dispatch.scheduler import LOCK_DUE, READ_UNLOCKED
from tests.support.engine_harness import NAMESPACE, EngineHarness, declare, engine_harness
from tests.support.runs import local_instance, soon

pytestmark = pytest.mark.anyio
POSTGRES_VERSIONS = (18, 16)


# -- once for each slot -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 5, 10])
async def test_of_many_schedulers_only_one_inserts_the_run_of_a_slot(address: str, count: int) -> None:
    """Together with the processes in `tests/instances` these are a thousand rounds; here, all statements overlap."""
    rounds = 60
    async with engine_harness(address, declare(every="1h")) as here:
        schedulers = [await here.scheduler() for _ in range(count)]
        slots = []
        for _ in range(rounds):
            slots.append(await here.due())
            await asyncio.gather(*(scheduler.schedule_due() for scheduler in schedulers))
        assert await here.slots() == slots
        assert sum(scheduler.scheduled for scheduler in schedulers) == rounds


async def test_the_lock_of_a_due_action_is_held_until_the_run_is_committed(address: str) -> None:
    """Two sessions interleaved by hand: between the read and the commit of the first, the second gets no action."""
    async with engine_harness(address, declare(every="1h")) as here:
        await here.due()
        values = {"actions": here.catalogue.ids, "batch": 10, "kind": Lock.ACTION.key(0)}
        with psycopg.connect(address) as first, psycopg.connect(address) as second:
            (mine,) = first.execute(NAMESPACE.sql(LOCK_DUE), values).fetchall()
            (theirs,) = second.execute(NAMESPACE.sql(LOCK_DUE), values).fetchall()
            assert (mine[1], theirs[1]) == (True, False)
            second.rollback()
            first.execute("UPDATE flotilla.actions SET next_run_at = now() + interval '1 hour'")
            (still,) = second.execute(NAMESPACE.sql(LOCK_DUE), values).fetchall()
            assert still[1] is False, "before the commit, only the lock shows that the slot is taken"
            second.rollback()
            first.commit()
            assert second.execute(NAMESPACE.sql(LOCK_DUE), values).fetchall() == []


async def test_releasing_the_lock_before_the_insert_would_make_two_runs(address: str) -> None:
    """The naive order, which the scheduler does not use: read, lock, release the lock, and only then insert."""
    find_due = "SELECT id FROM flotilla.actions WHERE next_run_at <= clock_timestamp()"
    insert = """
        INSERT INTO flotilla.runs (action_id, priority, run_at, max_attempts, trigger)
        SELECT id, 0, now(), 1, 'schedule' FROM flotilla.actions
    """
    async with engine_harness(address, declare(every="1h")) as here:
        await here.due()
        with psycopg.connect(address) as first, psycopg.connect(address) as second:
            for session in (first, second):
                (row,) = session.execute(find_due).fetchall()
                assert session.execute("SELECT pg_try_advisory_xact_lock(7, %s)", row).fetchone() == (True,)
                session.commit()
            for session in (first, second):
                session.execute(insert)
                session.execute("UPDATE flotilla.actions SET next_run_at = now() + interval '1 hour'")
                session.commit()
        assert await here.sql("SELECT count(*) FROM runs") == [(2,)], "the order of the scheduler prevents this"


async def test_a_slot_that_has_a_run_gets_no_second_one(address: str) -> None:
    """A second safeguard: as if the table had lost the advance of the slot."""
    async with engine_harness(address, declare(every="1h")) as here:
        scheduler = await here.scheduler()
        slot = await here.due()
        await scheduler.schedule_due()
        await here.sql("UPDATE actions SET next_run_at = %s RETURNING 1", slot)
        await scheduler.schedule_due()
        assert await here.slots() == [slot]


async def test_a_slot_of_a_scheduler_that_dies_before_its_commit_is_scheduled_by_another(address: str) -> None:
    async with engine_harness(address, declare(every="1h")) as here:
        slot = await here.due()
        with psycopg.connect(address) as doomed:
            values = {"actions": here.catalogue.ids, "batch": 10, "kind": Lock.ACTION.key(0)}
            doomed.execute(NAMESPACE.sql(LOCK_DUE), values)
            scheduler = await here.scheduler()
            await scheduler.schedule_due()
            assert await here.slots() == []
        await scheduler.schedule_due()
        assert await here.slots() == [slot]


async def test_a_pause_between_the_two_reads_of_the_scheduler_is_noticed(address: str) -> None:
    async with engine_harness(address, declare(every="1h")) as here:
        await here.due()
        values = {"actions": here.catalogue.ids, "batch": 10, "kind": Lock.ACTION.key(0)}
        with psycopg.connect(address) as session:
            assert len(session.execute(NAMESPACE.sql(LOCK_DUE), values).fetchall()) == 1
            await here.sql("UPDATE actions SET paused_at = now() RETURNING 1")
            assert session.execute(NAMESPACE.sql(READ_UNLOCKED), values).fetchall() == []


async def test_the_scheduler_does_not_overwrite_a_schedule_that_has_changed(address: str) -> None:
    """Between the second read and the update, another session has changed the schedule or resumed the action."""
    async with engine_harness(address, declare(every="1h")) as here:
        scheduler = await here.scheduler()
        slot = await here.due()
        later_slot = slot + timedelta(days=1)
        due = [(here.catalogue.id_of("tick"), "every 1h", "once", "allow", slot, slot)]
        await here.sql("UPDATE actions SET next_run_at = %s RETURNING 1", later_slot)
        async with here.database.connection() as connection:
            await scheduler._insert(connection, due)
        assert await here.next_slot() == later_slot


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("misfire", "runs"), [("once", 1), ("all", 6), ("skip", 0)])
async def test_after_an_outage_missed_slots_are_handled_as_misfire_says(address: str, misfire: Any, runs: int) -> None:
    async with engine_harness(address, declare(every="1m", misfire=misfire)) as here:
        slot = await here.due(timedelta(minutes=5, seconds=30))
        await (await here.scheduler()).schedule_due()
        missed = [slot + timedelta(minutes=number) for number in range(6)]
        assert await here.slots() == missed[6 - runs :]
        assert await here.next_slot() == slot + timedelta(minutes=6)


async def test_a_slot_that_is_a_few_seconds_late_is_not_a_misfire(address: str) -> None:
    async with engine_harness(address, declare(every="1m", misfire="skip")) as here:
        slot = await here.due(timedelta(seconds=5))
        await (await here.scheduler()).schedule_due()
        assert await here.slots() == [slot]


async def test_the_slots_of_a_very_long_outage_are_scheduled_in_several_rounds(address: str) -> None:
    async with engine_harness(address, declare(every="1s", misfire="all")) as here:
        await here.due(timedelta(seconds=400))
        scheduler = await here.scheduler()
        while await here.next_slot() < datetime.now(UTC):
            await scheduler.schedule_due()
        slots = await here.slots()
        assert len(slots) >= 400
        assert {later - sooner for sooner, later in pairwise(slots)} == {timedelta(seconds=1)}


async def test_overlap_skip_inserts_no_run_beside_an_active_one_and_advances_the_slot(address: str) -> None:
    async with engine_harness(address, declare(every="1m", overlap="skip")) as here:
        scheduler = await here.scheduler()
        first = await here.due()
        await scheduler.schedule_due()
        second = await here.due()
        await scheduler.schedule_due()
        assert await here.slots() == [first]
        assert await here.next_slot() == second + timedelta(minutes=1)


async def test_a_paused_action_is_not_scheduled(address: str) -> None:
    async with engine_harness(address, declare(every="1m")) as here:
        await here.due()
        await here.sql("UPDATE actions SET paused_at = now() RETURNING 1")
        await (await here.scheduler()).schedule_due()
        assert await here.slots() == []


async def test_jitter_delays_the_run_and_not_the_slot(address: str) -> None:
    async with engine_harness(address, declare(every="1m", jitter="30s")) as here:
        slot = await here.due()
        await (await here.scheduler()).schedule_due()
        ((scheduled_for, run_at),) = await here.sql("SELECT scheduled_for, run_at FROM runs")
        assert scheduled_for == slot
        assert slot <= run_at <= slot + timedelta(seconds=30)


async def test_an_action_that_this_instance_does_not_declare_is_not_scheduled(address: str) -> None:
    async with engine_harness(address, declare(every="1h"), declare("other", every="1h")) as here:
        here.catalogue.set_ids({"tick": here.catalogue.id_of("tick"), "other": here.catalogue.id_of("other")})
        older = Catalogue({"tick": here.catalogue["tick"]})
        older.set_ids({"tick": here.catalogue.id_of("tick")})
        here.catalogue = older
        await here.due(name="other")
        await (await here.scheduler()).schedule_due()
        assert await here.slots() == []


# -- declarations and the table ---------------------------------------------------------------------------------------


async def declared(here: EngineHarness, *actions: Action[Any]) -> None:
    """Start an instance with these declarations."""
    async with here.database.connection() as connection:
        await synchronise(connection, NAMESPACE, Catalogue({each.name: each for each in actions}))


async def test_an_unchanged_schedule_keeps_its_slot(address: str) -> None:
    async with engine_harness(address, declare(every="1h")) as here:
        slot = await here.due(timedelta(minutes=-10))
        for options in ({"every": "1h"}, {"every": "1h", "priority": 5}):
            await declared(here, declare(**options))
            assert await here.next_slot() == slot


async def test_a_shorter_interval_is_counted_from_now_and_a_longer_one_keeps_the_earlier_slot(address: str) -> None:
    async with engine_harness(address, declare(every="1h")) as here:
        slot = await here.due(timedelta(minutes=-10))
        await declared(here, declare(every="2h"))
        assert await here.next_slot() == slot
        await declared(here, declare(every="5m"))
        assert await here.next_slot() < slot


async def test_alternating_starts_of_two_releases_do_not_postpone_a_slot(address: str) -> None:
    async with engine_harness(address, declare(every="1h")) as here:
        slot = await here.next_slot()
        for _ in range(3):
            for interval in ("2h", "1h"):
                await declared(here, declare(every=interval))
                assert await here.next_slot() == slot


async def test_a_changed_schedule_has_no_slot_of_the_old_one(address: str) -> None:
    async with engine_harness(address, declare(every="1h")) as here:
        await here.due(timedelta(minutes=-10))
        await declared(here, declare(cron="0 0 1 1 *"))
        slot = await here.next_slot()
        assert (slot.month, slot.day, slot.hour, slot.minute) == (1, 1, 0, 0)


async def test_a_start_uses_ids_of_the_sequence_only_for_new_actions(address: str) -> None:
    """Ids have 28 bits and are never reused."""
    async with engine_harness(address, declare("a"), declare("b")) as here:
        for number in range(3):
            await declared(here, declare("a", priority=number), declare("b", every=f"{number + 1}h"), declare("c"))
        assert await here.sql("SELECT name, id FROM actions ORDER BY id") == [("a", 1), ("b", 2), ("c", 3)]
        assert await here.sql("SELECT last_value FROM actions_id_seq") == [(3,)]


async def test_two_instances_that_start_at_once_with_a_new_action_add_it_once(address: str) -> None:
    """The second waits for the first, and its declaration applies, because it is the last to start."""
    async with engine_harness(address, declare("a")) as here:
        async with here.database.connection() as first:
            await synchronise(first, NAMESPACE, Catalogue({"new": declare("new", priority=1)}))
            second = asyncio.create_task(declared(here, declare("a", priority=7), declare("new", priority=2)))
            await soon(lambda: here.sql("SELECT true FROM pg_locks WHERE NOT granted"))
        await second
        assert await here.sql("SELECT name, priority FROM actions ORDER BY name") == [("a", 7), ("new", 2)]


async def test_the_start_of_an_instance_repeats_a_transaction_that_ends_with_a_deadlock(address: str) -> None:
    """Another session locks two actions in the wrong order, which no statement of the template does."""
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(f"ALTER DATABASE {session.info.dbname} SET deadlock_timeout = '100ms'")
    async with local_instance(address) as here:
        await here.sql("UPDATE actions SET priority = 99 RETURNING 1")
        lock = "SELECT FROM flotilla.actions WHERE id = %s FOR UPDATE"
        waits = "SELECT true FROM pg_locks WHERE NOT granted AND pid = %s"
        with psycopg.connect(address) as wrong, psycopg.connect(address) as gate:
            # A session looks for a deadlock once, when it has waited for a while, and is ended if it finds one. So the
            # start must be the last one to wait: a third session stops it until the other one waits for it.
            wrong.execute("SET deadlock_timeout = '10min'")
            wrong.execute(lock, [3])
            gate.execute(lock, [2])
            starting = asyncio.create_task(here.engine.synchronise())
            await soon(lambda: here.sql("SELECT true FROM pg_locks WHERE NOT granted"))
            blocked = asyncio.create_task(asyncio.to_thread(wrong.execute, lock, [1]))
            await soon(lambda: here.sql(waits, wrong.info.backend_pid))
            gate.rollback()
            await blocked
        await starting
        assert await here.sql("SELECT count(*) FROM actions WHERE priority = 99") == [(0,)]


async def test_a_pause_survives_a_restart(address: str) -> None:
    async with engine_harness(address, declare(every="1h")) as here:
        await here.sql("UPDATE actions SET paused_at = now() RETURNING 1")
        async with here.database.connection() as connection:
            await synchronise(connection, NAMESPACE, Catalogue({"tick": declare(every="2h", priority=3)}))
        assert await here.sql("SELECT paused_at IS NOT NULL, priority FROM actions") == [(True, 3)]
