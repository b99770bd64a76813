"""Maintenance: what the reconciler, the rescuer and the pruner do about lost messages, dead instances and old runs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from app.fleet import Fenced, Run
from app.fleet.cluster.registry import BATCH
from app.fleet.db.namespace import Statement
from app.fleet.engine.dispatch.backlog import MANY
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.execute.attempt import Attempt, Ending
from app.fleet.engine.maintenance import pruner, reconciler, rescuer
from app.fleet.runs import requeue
from app.fleet.runs.effects import events as stream
from app.fleet.runs.prune import PRUNE_EVENTS
from tests.support.engine_harness import NAMESPACE, declare, engine_harness
from tests.support.runs import LocalInstance, local_instance, soon
from tests.support.service import service
from tests.support.trial_actions import EFFECTS

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(address: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalInstance]:
    # The tests call the pruner themselves. If a test takes longer than the interval, the leader would prune too.
    monkeypatch.setattr(pruner, "INTERVAL", 3600)
    async with local_instance(address) as own:
        yield own


INSERT = """
INSERT INTO runs (action_id, priority, run_at, max_attempts, trigger)
SELECT id, 0, clock_timestamp() + make_interval(secs => %s), 1, 'code' FROM actions WHERE name = 'noop' RETURNING id
"""


# -- lost notifications -----------------------------------------------------------------------------------------------


async def test_a_run_without_a_notification_is_found_by_the_reconciler(here: LocalInstance) -> None:
    ((run_id,),) = await here.sql(INSERT, 0)
    assert (await here.ended(run_id)).state == "succeeded"


async def test_runs_for_later_start_on_time_after_one_read_of_the_reconciler(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [(await here.sql(INSERT, delay))[0][0] for delay in (1.0, 1.3, 1.6)]
    # The reconciler reads once and finds the first run. After that, each claim reads when the next run is due.
    reads = here.engine.reconciler.reads
    monkeypatch.setattr(reconciler, "INTERVAL", 3600)
    here.engine.reconciler.read_now()
    await soon(lambda: reconciler_has_read(here, reads + 1))
    for run_id in ids:
        run = await here.ended(run_id)
        assert run.started_at is not None
        assert run.started_at >= run.run_at


async def reconciler_has_read(here: LocalInstance, times: int) -> bool:
    return here.engine.reconciler.reads >= times


# -- runs of dead instances -------------------------------------------------------------------------------------------


async def test_a_sweep_rescues_all_runs_of_a_gone_instance_also_more_than_a_batch(address: str) -> None:
    """The leader that declared the instance gone may have ended before it had rescued all of its runs."""
    async with engine_harness(address, declare()) as here:
        gone = (await here.instance("gone")).identity.id
        await here.sql("UPDATE instances SET state = 'gone'")
        await here.sql(
            "INSERT INTO runs (action_id, state, priority, run_at, instance_id, max_attempts, trigger) "
            "SELECT 1, 'running', 0, now(), %s, 1, 'code' FROM generate_series(1, %s)",
            gone,
            2 * BATCH + 500,
        )
        async with here.database.autocommit() as connection:
            await rescuer.sweep(connection, NAMESPACE)
        assert await here.sql("SELECT state, deaths, count(*) FROM runs GROUP BY 1, 2") == [("pending", 1, 2500)]


# -- lost responses ---------------------------------------------------------------------------------------------------


async def test_runs_of_a_claim_without_a_response_become_pending_and_are_claimed_again(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimant = here.engine.claimant
    genuine = claimant.claim
    lost: list[Any] = []

    async def lose_first_response(*given: Any) -> list[tuple[Any, ...]]:
        rows = await genuine(*given)
        if rows and not lost:
            lost.extend(rows)
            raise psycopg.OperationalError("the connection broke before the response")
        return rows

    monkeypatch.setattr(claimant, "claim", lose_first_response)
    run_id = await here.trigger("echo")
    run = await here.ended(run_id)
    assert [row[0] for row in lost] == [run_id]
    assert (run.state, run.attempt) == ("succeeded", 1), "as if it had not been claimed"


async def test_claimed_runs_start_even_if_reading_the_next_due_time_fails(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimant = here.engine.claimant
    asked: list[bool] = []

    async def fail(*_: Any) -> None:
        asked.append(True)
        raise psycopg.OperationalError("the connection broke during the query")

    monkeypatch.setattr(claimant, "_read_next_due", fail)
    await here.engine.triggers.trigger([Order("echo", run_at=datetime.now(UTC) + timedelta(hours=1))])
    await soon(lambda: here.sql("SELECT 1 WHERE %s", here.engine.backlog.next_due() is not None))
    run = await here.run("echo")
    assert (run.state, run.attempt) == ("succeeded", 1)
    assert asked


async def test_repeating_a_completion_without_a_response_is_not_counted_as_fenced(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = here.engine.executor.writer
    genuine = writer._finish
    lost: list[bool] = []

    async def lose_first_response(*given: Any) -> None:
        if not lost:
            settled = writer._settled
            monkeypatch.setattr(writer, "_settled", lambda _: None)
            await genuine(*given)
            monkeypatch.setattr(writer, "_settled", settled)
            lost.append(True)
            raise psycopg.OperationalError("the connection broke before the response")
        await genuine(*given)

    monkeypatch.setattr(writer, "_finish", lose_first_response)
    run = await here.run("echo", {"a": 1})
    assert lost
    assert run.result == {"a": 1}
    await soon(lambda: here.sql("SELECT 1 WHERE %s", here.engine.executor.room == 100))
    assert writer.fenced["completion"] == 0


async def test_events_are_stored_once_even_if_the_response_to_their_write_is_lost(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = stream.append
    lost: list[int] = []

    async def lose_every_other_response(*given: Any) -> set[tuple[int, int]]:
        stale = await genuine(*given)
        lost.append(len(given[2]))
        if len(lost) % 2:
            raise psycopg.OperationalError("the connection broke before the response")
        return stale

    monkeypatch.setattr(stream, "append", lose_every_other_response)
    first, second = await here.trigger_all([Order("chatter", {"count": 30, "pause": 0.0})] * 2)
    for run_id in (first, second):
        assert (await here.ended(run_id)).state == "succeeded"
        stored = await here.sql("SELECT seq, data->>'n' FROM run_events WHERE run_id = %s ORDER BY seq", run_id)
        assert stored == [(3 + number, str(number)) for number in range(30)]
    assert len(lost) > 1
    assert not here.engine.executor.writer.fenced


async def test_an_attempt_is_stopped_when_another_instance_has_taken_its_run(here: LocalInstance, address: str) -> None:
    run_id = await here.trigger("nap", {"seconds": 60})
    attempt = await here.attempt(run_id)
    async with local_instance(address, actions=("tests.support.trial_schedules",)) as other:
        # The new owner is alive, so the rescuer does not rescue the run.
        owner = other.running.context.member.identity
        assert owner is not None
        taken = "UPDATE runs SET token = token + 1, instance_id = %s WHERE id = %s RETURNING 1"
        await here.sql(taken, owner.id, run_id)
        await ended_fenced(attempt)


async def test_the_former_attempt_is_stopped_when_its_own_instance_claims_the_run_again(
    here: LocalInstance,
) -> None:
    run_id = await here.trigger("nap", {"seconds": 60})
    former = await here.attempt(run_id)
    # Only the new claim can detect the former attempt: the reconciler does not compare.
    with here.without_comparison():
        await here.sql("UPDATE runs SET state = 'pending' WHERE id = %s RETURNING 1", run_id)
        here.engine.reconciler.read_now()
        await ended_fenced(former)
    assert (await here.attempt(run_id)).token == former.token + 1


async def ended_fenced(attempt: Attempt) -> None:
    assert attempt.task is not None
    await asyncio.wait_for(asyncio.wait([attempt.task]), 60)
    assert attempt.ending is Ending.FENCED


async def test_the_reconciler_reads_a_limit_that_only_the_table_has(here: LocalInstance) -> None:
    await here.sql("UPDATE actions SET concurrency = 1 WHERE name = 'nap' RETURNING 1")
    for run_id in await here.trigger_all([Order("nap", {"seconds": 0.01})] * 5):
        await here.ended(run_id)


async def test_runs_and_requests_succeed_with_a_pool_of_one_connection(address: str) -> None:
    async with local_instance(address, pool_min=1, pool_max=1) as here:
        for run_id in await here.trigger_all([Order("echo")] * 50):
            await here.ended(run_id)
        assert (await here.running.client.get("/actions")).status_code == 200


# -- late writers -----------------------------------------------------------------------------------------------------


async def test_every_write_with_an_old_token_is_fenced_while_another_attempt_runs(here: LocalInstance) -> None:
    run_ids = [await here.trigger("nap", {"seconds": 60}) for _ in range(4)]
    by_checkpoint, by_guard, by_commit, by_event = [await here.handle(each) for each in run_ids]
    with here.without_comparison():
        # As if a living instance had claimed each run again: the rows are running, with another token.
        await here.sql("UPDATE runs SET token = token + 1 RETURNING 1")
        with pytest.raises(Fenced):
            await by_checkpoint.checkpoint({"late": True})
        with pytest.raises(Fenced):
            await within_guard(here, by_guard)
        with pytest.raises(Fenced):
            await within_commit(by_commit)
        await by_event.emit("late")
        writer = here.engine.executor.writer
        await writer.empty()
        assert writer.fenced == {"checkpoint": 1, "guard": 1, "commit": 1, "event": 1}
        assert await here.sql("SELECT count(*) FROM runs WHERE state = 'running' AND checkpoint IS NULL") == [(4,)]
        assert await here.sql("SELECT * FROM run_events") == []


async def within_guard(here: LocalInstance, run: Run[Any]) -> None:
    async with here.running.context.database.session() as session:
        await run.guard(session)


async def within_commit(run: Run[Any]) -> None:
    async with run.commit():
        pass


async def test_a_commit_waits_until_earlier_events_of_the_run_are_written(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    await here.sql(EFFECTS)
    writer = here.engine.executor.writer
    genuine = writer._append_events

    async def slowly(*given: Any) -> None:
        await asyncio.sleep(0.3)
        await genuine(*given)

    monkeypatch.setattr(writer, "_append_events", slowly)
    run = await here.run("note")
    assert run.state == "succeeded"
    assert await here.sql("SELECT kind FROM run_events") == [("noting",)]
    assert not writer.fenced


# -- runs that hang or kill their instance ----------------------------------------------------------------------------


async def test_a_run_beyond_its_deadline_becomes_pending_or_failed(address: str) -> None:
    async with engine_harness(address, declare(retries=1)) as here:
        await here.trigger(Order("tick"), Order("tick"))
        one = await here.instance("one")
        (first, second) = await one.claim()
        await here.sql("UPDATE runs SET deadline_at = now() - interval '1 h' RETURNING 1")
        await here.sql("UPDATE runs SET attempt = 2 WHERE id = %s RETURNING 1", second.run_id)
        async with here.database.autocommit() as connection:
            await rescuer.sweep(connection, NAMESPACE)
        ((run_id, state, error),) = await here.sql("SELECT id, state, error FROM runs")
        assert (run_id, state) == (first.run_id, "pending")
        assert "exceeded its deadline, and its instance one did not end it" in error
        assert await here.sql("SELECT id, state, error FROM finished_runs") == [(second.run_id, "failed", error)]


async def test_a_run_with_a_cancellation_request_is_cancelled_instead_of_rescued(address: str) -> None:
    """The sweep and the transaction that declares an instance gone cancel such a run, whatever retries it has left."""
    async with engine_harness(address, declare()) as here:
        hung, orphaned = await here.trigger(Order("tick"), Order("tick"))
        one = await here.instance("one")
        assert len(await one.claim()) == 2
        await here.sql("UPDATE runs SET cancel_requested_at = now() RETURNING 1")
        await here.sql("UPDATE runs SET deadline_at = now() - interval '1 h' WHERE id = %s RETURNING 1", hung)
        async with here.database.autocommit() as connection:
            await rescuer.sweep(connection, NAMESPACE)
        assert await here.sql("SELECT id, state FROM runs") == [(orphaned, "running")]
        with psycopg.connect(address) as death:
            rescuer.Rescue(NAMESPACE)(death, [one.identity.id])
        ended = await here.sql("SELECT id, state, error FROM finished_runs ORDER BY id")
        assert ended == [(run_id, "cancelled", "cancelled on request") for run_id in (hung, orphaned)]


async def test_a_sweep_does_not_change_a_run_within_its_deadline(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        await here.trigger(Order("tick"))
        await (await here.instance("one")).claim()
        async with here.database.autocommit() as connection:
            await rescuer.sweep(connection, NAMESPACE)
        assert await here.sql("SELECT state FROM runs") == [("running",)]


async def test_a_run_that_was_locked_when_its_instance_was_declared_gone_is_rescued_later(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        (run_id,) = await here.trigger(Order("tick"))
        one = await here.instance("one")
        await one.claim()
        with psycopg.connect(address) as guarded, psycopg.connect(address) as death:
            guarded.execute("SELECT FROM flotilla.runs WHERE id = %s FOR KEY SHARE", [run_id])
            death.execute("UPDATE flotilla.instances SET state = 'gone'")
            rescuer.Rescue(NAMESPACE)(death, [one.identity.id])
            death.commit()
            assert await here.sql("SELECT state FROM runs") == [("running",)], "the rescue did not wait for the lock"
        async with here.database.autocommit() as connection:
            await rescuer.sweep(connection, NAMESPACE)
        assert await here.sql("SELECT state, deaths, error FROM runs") == [
            ("pending", 1, "the instance one died while it ran it")
        ]


async def test_a_run_fails_after_it_has_killed_the_maximum_number_of_instances(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        (run_id,) = await here.trigger(Order("tick"))
        for number in range(requeue.MAX_DEATHS):
            one = await here.instance(f"i-{number}")
            assert [run.run_id for run in await one.claim()] == [run_id]
            with psycopg.connect(address) as death:
                rescuer.Rescue(NAMESPACE)(death, [one.identity.id])
        assert await here.sql("SELECT state, error FROM finished_runs") == [
            ("failed", f"{requeue.MAX_DEATHS} instances died while they ran it, the last of them i-19")
        ]


# -- retention --------------------------------------------------------------------------------------------------------


def limit_time(here: LocalInstance, monkeypatch: pytest.MonkeyPatch, takes_long: Callable[[list[int]], bool]) -> None:
    """Set a short time limit for these batches of runs only: on a busy machine, any other one may take as long."""
    genuine = here.engine.pruner._in_time

    async def in_time(statement: Statement, values: dict[str, Any]) -> int | None:
        monkeypatch.setattr(pruner, "TIME_LIMIT", 0.3 if takes_long(values["ids"]) else 60.0)
        return await genuine(statement, values)

    monkeypatch.setattr(here.engine.pruner, "_in_time", in_time)


async def test_an_expired_run_is_deleted_with_its_events_and_its_key(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruner, "BATCH", 40)
    here.engine.pruner._batch = 40
    walked = await here.run("walk", {"steps": 3, "seconds": 0}, key="once")
    kept = await here.run("echo", key="kept")
    for run_id in await here.trigger_all([Order("noop", key=f"k-{number}") for number in range(100)]):
        await here.ended(run_id)
    await here.sql("UPDATE finished_runs SET expires_at = now() - interval '1 h' WHERE id <> %s RETURNING 1", kept.id)
    assert await here.engine.pruner.prune() == 101
    assert await here.sql("SELECT id FROM finished_runs") == [(kept.id,)]
    assert await here.sql("SELECT run_id FROM run_keys") == [(kept.id,)]
    assert await here.sql("SELECT * FROM run_events WHERE run_id = %s", walked.id) == []
    assert await here.trigger("echo", key="kept") == kept.id
    again = await here.trigger("walk", {"steps": 1, "seconds": 0}, key="once")
    assert again != walked.id


async def test_the_pruner_halves_a_batch_that_takes_too_long(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = """
        CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN PERFORM pg_sleep(0.02); RETURN OLD; END $$;
        CREATE TRIGGER slow BEFORE DELETE ON finished_runs FOR EACH ROW EXECUTE FUNCTION slow();
    """
    for run_id in await here.trigger_all([Order("noop")] * 60):
        await here.ended(run_id)
    await here.sql("UPDATE finished_runs SET expires_at = now() - interval '1 h' RETURNING 1")
    await here.sql(slow)
    limit_time(here, monkeypatch, lambda ids: len(ids) > 20)
    monkeypatch.setattr(pruner, "BATCH", 50)
    here.engine.pruner._batch = 50
    assert await here.engine.pruner.prune() == 60


SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM nextval('flotilla.tried');
    PERFORM pg_sleep(60);
    RETURN OLD;
END $$;
CREATE SEQUENCE tried;
CREATE TRIGGER slow BEFORE DELETE ON finished_runs FOR EACH ROW WHEN (OLD.id = {run}) EXECUTE FUNCTION slow();
"""
EXPIRE = "UPDATE finished_runs SET expires_at = now() - interval '1 h' + id * interval '1 ms' RETURNING id"


async def test_the_pruner_skips_a_run_that_it_cannot_delete_in_time(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run_id in await here.trigger_all([Order("noop")] * 40):
        await here.ended(run_id)
    first = min(await here.sql(EXPIRE))[0]
    slow = {first}
    limit_time(here, monkeypatch, lambda ids: not slow.isdisjoint(ids))
    await here.sql(SLOW.format(run=first))
    async with asyncio.timeout(60):
        assert await here.engine.pruner.prune() == 39
        assert await here.sql("SELECT id FROM finished_runs") == [(first,)]
        ((tried,),) = await here.sql("SELECT last_value FROM tried")
        assert tried <= 8, "the batch was halved until the slow run was alone in it"
        assert here.engine.pruner.skipped == 1
        # A run that ended in the meantime is pruned; the skipped run is not tried again in each round.
        await here.run("noop")
        await here.sql("UPDATE finished_runs SET expires_at = now() WHERE id > %s RETURNING 1", first)
        assert await here.engine.pruner.prune() == 1
        assert await here.sql("SELECT last_value FROM tried") == [(tried,)]
        # Later it is.
        await here.sql("DROP TRIGGER slow ON finished_runs")
        slow.clear()
        monkeypatch.setattr(here.engine.pruner, "_restart_at", 0.0)
        assert await here.engine.pruner.prune() == 1
        assert here.engine.pruner.skipped == 0


async def with_many_events(here: LocalInstance) -> int:
    """Create a failed run whose retention is over, with 101 stored events."""
    run = await here.run("give-up")
    await here.sql("UPDATE finished_runs SET events = 104, expires_at = now() - interval '1 h' RETURNING 1")
    await here.sql(
        "INSERT INTO run_events (run_id, seq, kind) SELECT %s, n, 'said' FROM generate_series(3, 103) AS n RETURNING 1",
        run.id,
    )
    return run.id


async def test_the_pruner_deletes_a_bounded_number_of_events_at_a_time(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_of_events = """
        CREATE FUNCTION few() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF (SELECT count(*) FROM gone) > 10 THEN RAISE 'too many at once'; END IF;
            RETURN NULL;
        END $$;
        CREATE TRIGGER few AFTER DELETE ON run_events REFERENCING OLD TABLE AS gone
        FOR EACH STATEMENT EXECUTE FUNCTION few();
    """
    monkeypatch.setattr(pruner, "MAX_EVENTS", 10, raising=False)
    await with_many_events(here)
    await here.sql(limit_of_events)
    assert await here.engine.pruner.prune() == 1
    assert await here.sql("SELECT count(*) FROM run_events") == [(0,)]
    assert await here.sql("SELECT count(*) FROM finished_runs") == [(0,)]


async def test_a_run_with_partly_pruned_events_can_be_neither_followed_nor_retried(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruner, "MAX_EVENTS", 10)
    run_id = await with_many_events(here)
    genuine = here.engine.pruner._in_time
    pieces: list[object] = []

    async def die(statement: Statement, values: dict[str, Any]) -> int | None:
        if statement == PRUNE_EVENTS:
            pieces.append(values)
            if len(pieces) == 3:
                raise psycopg.OperationalError("the connection broke")
        return await genuine(statement, values)

    with monkeypatch.context() as patch, pytest.raises(psycopg.OperationalError):
        patch.setattr(here.engine.pruner, "_in_time", die)
        await here.engine.pruner.prune()
    assert await here.sql("SELECT count(*) FROM run_events") == [(83,)]
    assert (await here.running.client.post(f"/runs/{run_id}/retry")).status_code == 404
    assert (await here.running.client.get(f"/runs/{run_id}/events")).status_code == 404
    # A new pruner, as on the next leader, deletes the rest.
    assert await pruner.Pruner(here.running.context.database, here.running.context.member).prune() == 1
    assert await here.sql("SELECT count(*) FROM run_events") == [(0,)]


async def test_a_prune_of_one_table_that_fails_or_hangs_does_not_delay_the_others(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruner, "INTERVAL", 0.02)
    begun: list[str] = []

    async def hang(_: object) -> None:
        begun.append("feed")
        await asyncio.Event().wait()

    async def fail(_: object) -> None:
        begun.append("keys")
        raise psycopg.OperationalError("the connection broke")

    monkeypatch.setattr(pruner.Pruner, "prune_feed", hang)
    monkeypatch.setattr(pruner.Pruner, "prune_keys", fail)
    async with local_instance(address) as own:
        await soon(lambda: own.sql("SELECT 1 WHERE %s", begun.count("keys") > 1 and "feed" in begun))
        await own.run("noop")
        await own.sql("UPDATE finished_runs SET expires_at = now() - interval '1 h' RETURNING 1")
        await soon(lambda: own.sql("SELECT 1 WHERE NOT EXISTS (SELECT FROM finished_runs)"))


async def test_a_feed_without_readers_is_pruned(here: LocalInstance) -> None:
    await here.run("noop")
    await here.sql("UPDATE feed SET at = at - interval '1 h' RETURNING 1")
    await here.engine.pruner.prune_feed()
    assert await here.sql("SELECT state, first, many FROM feed") == [("unread", 1, 3)]


# -- claiming, and the parts of the queues ----------------------------------------------------------------------------


async def test_an_instance_does_not_claim_while_its_claiming_is_paused(
    here: LocalInstance,
) -> None:
    here.engine.dispatcher.pause_claiming(True)
    run_id = await here.trigger("echo")
    # The instance was notified of the run, and its reconciler has read the queues.
    reads = here.engine.reconciler.reads
    here.engine.reconciler.read_now()
    await soon(lambda: reconciler_has_read(here, reads + 2))
    assert (await here.read(run_id)).state == "pending"
    here.engine.dispatcher.pause_claiming(False)
    assert (await here.ended(run_id)).state == "succeeded"


async def test_an_unexpected_exception_does_not_end_a_service_of_the_engine(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher, scheduler, reconciler = here.engine.dispatcher, here.engine.scheduler, here.engine.reconciler
    for each, method in ((dispatcher, "_claim"), (scheduler, "schedule_due"), (reconciler, "_reconcile")):
        genuine = getattr(each, method)
        failed: list[bool] = []

        async def fail_once(*given: Any, genuine: Any = genuine, failed: list[bool] = failed) -> Any:
            if not failed:
                failed.append(True)
                raise ZeroDivisionError
            return await genuine(*given)

        monkeypatch.setattr(each, method, fail_once)
        scheduler.schedule_now()
        reconciler.read_now()
        run_id = await here.trigger("echo")
        assert (await here.ended(run_id)).state == "succeeded"

        async def has_failed(failed: list[bool] = failed) -> bool:
            return bool(failed)

        await soon(has_failed)
    run_id = await here.trigger("echo")
    assert (await here.ended(run_id)).state == "succeeded"


async def test_instances_with_the_same_actions_divide_the_queues_among_them(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The instances learn their parts at once, not with the next read of the reconciler.
    monkeypatch.setattr(reconciler, "INTERVAL", 3600)
    async with (
        local_instance(address) as one,
        local_instance(address) as two,
        service(address, actions=("tests.support.trial_schedules",)) as other,
    ):
        backlogs = [each.engine.backlog for each in (one, two)]
        await soon(lambda: one.sql("SELECT 1 WHERE %s", sorted(each.part for each in backlogs) == [(0, 2), (1, 2)]))
        assert other.context.engine.backlog.part == (0, 1)


async def test_queues_in_the_part_of_an_absent_instance_are_claimed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "INTERVAL", 3600)
    async with local_instance(address) as here:
        backlog = here.engine.backlog
        await soon(lambda: here.sql("SELECT 1 WHERE %s", here.engine.reconciler.reads >= 2))
        # As if this action were in the part of another instance that has ended since.
        backlog.part = ((here.engine.catalogue.id_of("noop") + 1) % 2, 2)
        for run_id in await here.trigger_all([Order("noop", priority=number) for number in range(MANY + 1)]):
            assert (await here.ended(run_id)).state == "succeeded"
