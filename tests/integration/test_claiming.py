"""A pending run is claimed by one living instance, in the right order, within the limits of its action."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from app.fleet.cluster.registry import Registry
from app.fleet.db.pool.statements import array
from app.fleet.duration import RATE_TOLERANCE
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.synchronise import synchronise
from app.fleet.engine.dispatch.backlog import MANY, QueueKey
from app.fleet.engine.dispatch.claimant import LIMIT_RETRY
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.maintenance.rescuer import Rescue
from app.fleet.runs.claim import ALLOWED, CLAIM, Row
from app.fleet.runs.end import FINISH
from tests.support.engine_harness import NAMESPACE, Claimed, Claiming, EngineHarness, declare, engine_harness

pytestmark = pytest.mark.anyio
POSTGRES_VERSIONS = (18, 16)

ALLOWED_OF = ALLOWED.replace("{schema}", "flotilla").replace("%(actions)s", "%s")


async def test_instances_that_claim_at_the_same_time_get_different_runs(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        ids = await here.trigger(*[Order("tick")] * 500)
        claiming = [await here.instance(f"i-{number}") for number in range(5)]
        shares = await asyncio.gather(*(each.claim(room=60) for each in claiming))
        claimed = [run.run_id for share in shares for run in share]
        assert len(claimed) == len(set(claimed)) == 300
        assert set(claimed) <= set(ids)


async def test_a_claim_skips_a_locked_run_without_waiting(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        first, second = await here.trigger(Order("tick"), Order("tick"))
        with psycopg.connect(address) as holder:
            holder.execute("SELECT 1 FROM flotilla.runs WHERE id = %s FOR UPDATE", [first])
            one = await here.instance("one")
            assert [run.run_id for run in await one.claim()] == [second]
        assert [run.run_id for run in await one.claim()] == [first]


async def test_runs_are_claimed_by_priority_and_then_by_waiting_time(address: str) -> None:
    now = datetime.now(UTC)
    async with engine_harness(address, declare()) as here:
        late, early, urgent, idle = await here.trigger(
            Order("tick", run_at=now - timedelta(seconds=5)),
            Order("tick", run_at=now - timedelta(seconds=9)),
            Order("tick", priority=5, run_at=now - timedelta(seconds=1)),
            Order("tick", priority=-5, run_at=now - timedelta(hours=1)),
        )
        one = await here.instance("one")
        assert [(await one.claim(room=1))[0].run_id for _ in range(4)] == [urgent, early, late, idle]


async def test_a_flood_of_one_action_does_not_starve_another(address: str) -> None:
    async with engine_harness(address, declare("flood"), declare("tick")) as here:
        await here.trigger(*[Order("flood")] * 1000)
        (lone,) = await here.trigger(Order("tick"))
        one = await here.instance("one")
        assert lone in {run.run_id for run in await one.claim(room=10)}


LIMITS: list[dict[str, Any]] = [{}, {"concurrency": 1000}, {"rate": "1000/s", "burst": 1000}]


def names(claimed: Sequence[Claimed], ids: dict[int, str]) -> Counter[str]:
    return Counter(ids[run.run_id] for run in claimed)


@pytest.mark.parametrize("ordering_key", [None, "a"])
@pytest.mark.parametrize("limit", LIMITS)
async def test_a_run_with_a_higher_priority_is_claimed_first_also_if_limited_or_ordered(
    address: str, limit: dict[str, Any], ordering_key: str | None
) -> None:
    async with engine_harness(address, declare("flood", priority=-5), declare("urgent", priority=5, **limit)) as here:
        await here.trigger(*[Order("flood")] * 50)
        (urgent,) = await here.trigger(Order("urgent", ordering_key=ordering_key))
        one = await here.instance("one")
        assert [run.run_id for run in await one.claim(room=1)] == [urgent]
        assert len(await one.claim(room=10)) == 10


@pytest.mark.parametrize("limit", LIMITS)
async def test_within_a_priority_the_longest_waiting_run_is_claimed_first_also_if_limited(
    address: str, limit: dict[str, Any]
) -> None:
    now = datetime.now(UTC)
    async with engine_harness(address, declare("free"), declare("limited", **limit)) as here:
        for sooner, later in (("free", "limited"), ("limited", "free")):
            first, second = await here.trigger(
                Order(sooner, run_at=now - timedelta(minutes=9)), Order(later, run_at=now - timedelta(minutes=8))
            )
            one = await here.instance(f"before {later}")
            assert [(await one.claim(room=1))[0].run_id for _ in range(2)] == [first, second]


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_claim_shares_its_room_among_queues_of_one_priority_before_lower_ones(
    address: str, limit: dict[str, Any]
) -> None:
    actions = [declare("flood", priority=5, **limit), declare("calm", priority=5), declare("low")]
    async with engine_harness(address, *actions) as here:
        flood = dict.fromkeys(await here.trigger(*[Order("flood")] * 100), "flood")
        low = dict.fromkeys(await here.trigger(*[Order("low")] * 100), "low")
        calm = dict.fromkeys(await here.trigger(Order("calm"), Order("calm")), "calm")
        one = await here.instance("one")
        assert names(await one.claim(room=10), flood | low | calm) == {"flood": 8, "calm": 2}
        assert names(await one.claim(room=95), flood | low | calm) == {"flood": 92, "low": 3}


async def test_queues_without_limits_are_claimed_in_one_statement_whatever_their_priorities(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions = [declare(f"tick-{number}", priority=number // 2) for number in range(6)]
    async with engine_harness(address, *actions) as here:
        made = await here.trigger(*[Order(each.name) for each in actions])
        one = await here.instance("one")
        genuine, calls = one.claimant._claim, []

        async def counted(*args: Any, **options: Any) -> list[Row]:
            calls.append(args)
            return await genuine(*args, **options)

        monkeypatch.setattr(one.claimant, "_claim", counted)
        assert {run.run_id for run in await one.claim()} == set(made)
        assert len(calls) == 1


async def test_a_claim_locks_no_more_than_it_takes_and_sorts_no_runs(address: str) -> None:
    """Read its plan on a dedicated connection: it reads the queues in order, and from each only as many runs as fit."""
    async with engine_harness(address, *[declare(f"tick-{number}") for number in range(3)]) as here:
        one, dedicated = await here.instance("one"), here.database.dedicated()
        await here.trigger(*[Order(f"tick-{number}") for number in range(3)] * 100)
        values = {"me": one.identity.id, "name": "one", "counted": False, "room": 8, "mosts": "{4,4,4}"}
        values |= {"actions": array(here.catalogue.ids[::-1]), "priorities": "{0,0,0}", "passed": "{0,0,0}"}
        values |= {"floors": "{2020-01-01,2020-01-01,2020-01-01}", "timeouts": "{60,60,60}"}
        async with dedicated.connection() as connection:
            explain = b"EXPLAIN (ANALYZE, FORMAT JSON) " + NAMESPACE.sql(CLAIM)
            ((plan,),) = await (await connection.execute(explain, values)).fetchall()
        await dedicated.close()

        locks = [node for node in nodes(plan[0]["Plan"]) if node["Node Type"] == "LockRows"]
        assert sum(node["Actual Rows"] * node["Actual Loops"] for node in locks) == 8 + 1, "the runs, and the instance"
        claimed = await here.sql("SELECT action_id, count(*) FROM runs WHERE state = 'running' GROUP BY 1 ORDER BY 1")
        assert claimed == [(here.catalogue.ids[1], 4), (here.catalogue.ids[2], 4)], "in the order of the queues"


async def test_running_runs_are_counted_only_for_an_action_with_concurrency(address: str) -> None:
    async with engine_harness(
        address, declare("rated", rate="10/s"), declare("both", rate="10/s", concurrency=5)
    ) as here:
        counted = []
        for identifier in here.catalogue.ids:
            ((plan,),) = await here.sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {ALLOWED_OF}", [identifier])
            counted.append(any(scan["Actual Loops"] > 0 for scan in scans(plan[0]["Plan"], "runs")))
        assert counted == [False, True]


@pytest.mark.parametrize("ordering_key", [False, True])
@pytest.mark.parametrize(
    "text", ["repeat('x', 1000000)", "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 31250) AS n)"]
)
async def test_a_claim_is_bounded_in_bytes_and_the_next_claim_takes_the_rest(
    address: str, text: str, ordering_key: bool
) -> None:
    """Payload and checkpoint have a megabyte each, compressible or not."""
    async with engine_harness(address, declare()) as here:
        made = await here.trigger(*[Order("tick", ordering_key=f"{n}" if ordering_key else None) for n in range(40)])
        await here.sql(f"UPDATE runs SET payload = to_json({text}), checkpoint = to_json({text}) RETURNING 1")
        one = await here.instance("one")
        claimed = await one.claim(room=500)
        assert 4 <= len(claimed) <= 9
        while more := await one.claim(room=500, everywhere=False):
            assert len(more) <= 9
            claimed += more
        assert sorted(run.run_id for run in claimed) == made


async def test_a_run_that_becomes_due_during_a_claim_is_claimed_by_the_next_claim(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes due after the claim has read the queue, and before the claim reads when the next run is due."""
    async with engine_harness(address, declare()) as here:
        one = await here.instance("one")
        # The claim sets the clock of the instance.
        await one.claim()
        later = datetime.now(UTC) + timedelta(hours=1)
        _, waits = await here.trigger(Order("tick"), Order("tick", run_at=later))
        read_next_due = one.claimant._read_next_due

        async def read_when_the_run_is_due(*values: Any) -> None:
            # As if its time had come at this moment.
            await here.sql("UPDATE runs SET run_at = clock_timestamp() WHERE id = %s", waits)
            await read_next_due(*values)

        monkeypatch.setattr(one.claimant, "_read_next_due", read_when_the_run_is_due)
        now = asyncio.get_running_loop().time()
        one.backlog.add(here.catalogue.id_of("tick"), 0, later, now)
        assert len(await one.claim()) == 1
        assert len(await one.claim(everywhere=False)) == 1


async def test_a_run_is_not_claimed_before_its_run_at(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        await here.trigger(Order("tick", run_at=datetime.now(UTC) + timedelta(hours=1)))
        assert await (await here.instance("one")).claim() == []


async def test_a_paused_action_is_not_claimed(address: str) -> None:
    async with engine_harness(address, declare("tick"), declare("other")) as here:
        await here.trigger(Order("tick"))
        (free,) = await here.trigger(Order("other"))
        await here.sql("UPDATE actions SET paused_at = now() WHERE name = 'tick' RETURNING 1")
        assert [run.run_id for run in await (await here.instance("one")).claim()] == [free]


async def test_an_instance_that_was_declared_gone_claims_no_run(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        await here.trigger(Order("tick"))
        one = await here.instance("one")
        await here.sql("UPDATE instances SET state = 'gone' RETURNING 1")
        assert await one.claim() == []


async def test_an_instance_is_not_declared_gone_during_its_claim_and_the_claimed_run_is_rescued(address: str) -> None:
    """Interleaved by hand: the row of the claiming instance is held until its claim is committed."""
    async with engine_harness(address, declare()) as here:
        await here.trigger(Order("tick"))
        one = await here.instance("one")
        register = Registry(NAMESPACE, [Rescue(NAMESPACE)])
        async with here.database.connection() as connection:
            now = asyncio.get_running_loop().time()
            one.backlog.add(here.catalogue.id_of("tick"), 0, datetime(2020, 1, 1, tzinfo=UTC), now)
            due = one.backlog.due(now)
            assert len(await one.claimant.claim(connection, one.identity, due, 1, now)) == 1
            # Not committed yet.
            with psycopg.connect(address, autocommit=True) as leader:
                assert register.declare_gone(leader, one.identity.id, "it looks dead") is None
        with psycopg.connect(address, autocommit=True) as leader:
            assert register.declare_gone(leader, one.identity.id, "it looks dead") == "one"
        assert await here.sql("SELECT state, deaths FROM runs") == [("pending", 1)]


@pytest.mark.parametrize("limit", [1, 3])
async def test_concurrency_is_exact_in_the_whole_cluster(address: str, limit: int) -> None:
    async with engine_harness(address, declare(concurrency=limit)) as here:
        await here.trigger(*[Order("tick")] * 60)
        claiming = [await here.instance(f"i-{number}") for number in range(6)]
        ended = 0
        while ended < 60:
            await asyncio.gather(*(each.claim() for each in claiming))
            running = await here.sql("SELECT id FROM runs WHERE state = 'running'")
            # It is empty if each instance found only runs that another instance had locked.
            assert len(running) <= limit
            await here.sql("DELETE FROM runs WHERE state = 'running' RETURNING 1")
            ended += len(running)


async def test_with_overlap_queue_one_run_of_the_action_is_claimed_at_a_time(address: str) -> None:
    async with engine_harness(address, declare(overlap="queue")) as here:
        first, second = await here.trigger(Order("tick"), Order("tick"))
        one, two = await here.instance("one"), await here.instance("two")
        assert [run.run_id for run in await one.claim()] == [first]
        assert await two.claim() == []
        await here.sql("DELETE FROM runs WHERE id = %s RETURNING 1", first)
        assert [run.run_id for run in await two.claim()] == [second]


async def test_all_instances_together_keep_the_rate_of_an_action(address: str) -> None:
    async with engine_harness(address, declare(rate="20/s", burst=20)) as here:
        await here.trigger(*[Order("tick")] * 200)
        claiming = [await here.instance(f"i-{number}") for number in range(4)]
        loop = asyncio.get_running_loop()
        began = loop.time()
        started = 0
        # At most 20 at once, and then 20 a second; fewer only if no instance claims for a long time.
        while started < 50:
            for share in await asyncio.gather(*(each.claim() for each in claiming)):
                started += len(share)
            assert started <= 20 + 20 * (loop.time() - began + RATE_TOLERANCE)


@pytest.mark.parametrize(("given", "burst"), [({}, 1), ({"burst": 3}, 3)])
async def test_after_a_pause_a_burst_starts_at_once_and_nothing_beyond_it(
    address: str, given: dict[str, Any], burst: int
) -> None:
    async with engine_harness(address, declare(rate="24/d", **given)) as here:
        await here.trigger(*[Order("tick")] * 10)
        claiming = [await here.instance(f"i-{number}") for number in range(2)]
        started = [len(await each.claim()) for each in claiming * 2]
        assert started == [burst, 0, 0, 0]


async def test_a_high_rate_is_reached_with_a_burst_of_one(address: str) -> None:
    """A claim makes up for the time since the last one, if that is no longer than the tolerance."""
    async with engine_harness(address, declare(rate="1000/s")) as here:
        await here.trigger(*[Order("tick")] * 200)
        assert len(await (await here.instance("one")).claim(room=200)) == 1 + 1000 * RATE_TOLERANCE


async def test_a_rate_beyond_any_number_of_runs_allows_as_many_as_there_are(address: str) -> None:
    async with engine_harness(address, declare(rate="999999999/ms")) as here:
        await here.trigger(*[Order("tick")] * 20)
        assert len(await (await here.instance("one")).claim()) == 20


async def test_a_rate_allows_the_next_start_when_the_wait_for_it_is_over(address: str) -> None:
    async with engine_harness(address, declare(rate="10/s", burst=3)) as here:
        found = []
        for ahead in (0.0, 0.1, 0.19, 0.21, 0.23, 0.27, 0.29, 0.31, 60.0):
            used = "UPDATE actions SET rate_used_until = clock_timestamp() + make_interval(secs => %s) RETURNING 1"
            await here.sql(used, ahead)
            found += await here.sql(f"SELECT allowed > 0, seconds <= 0 FROM ({ALLOWED_OF}) AS a", here.catalogue.ids)
        assert all(allowed is over for allowed, over in found), found
        assert {allowed for allowed, _ in found} == {True, False}


async def test_at_its_concurrency_an_action_is_not_asked_again_at_once_because_its_rate_is_free(address: str) -> None:
    async with engine_harness(address, declare(concurrency=1, rate="1000/s")) as here:
        await here.trigger(*[Order("tick")] * 3)
        one = await here.instance("one")
        assert len(await one.claim()) == 1
        now = asyncio.get_running_loop().time()
        assert await one.claim() == []
        due = one.backlog.next_due()
        assert due is not None
        assert due >= now + LIMIT_RETRY


async def change(here: EngineHarness, **options: Any) -> None:
    """Synchronise as an instance does that declares the action `tick` with these options."""
    async with here.database.connection() as connection:
        await synchronise(connection, NAMESPACE, Catalogue({"tick": declare(**options)}))


@pytest.mark.parametrize(
    ("before", "started", "after", "more"),
    [
        ({"rate": "2/d", "burst": 2}, 2, {"rate": "1000/d", "burst": 1000}, 998),
        ({"rate": "2/d", "burst": 2}, 2, {"rate": "2/d", "burst": 3}, 1),
        ({"rate": "10/d", "burst": 10}, 10, {"rate": "10/h", "burst": 10}, 0),
        ({"rate": "4/d", "burst": 4}, 4, {"rate": "2/d"}, 0),
        ({"rate": "2/d", "burst": 2}, 2, {}, 1000),
    ],
)
async def test_a_changed_rate_holds_from_the_next_claim_on(
    address: str, before: dict[str, Any], started: int, after: dict[str, Any], more: int
) -> None:
    """Runs that have started still count; the waiting time of the old rate does not."""
    async with engine_harness(address, declare(**before)) as here:
        await here.trigger(*[Order("tick")] * 1200)
        one = await here.instance("one")
        assert len(await one.claim(room=1000)) == started
        await change(here, **after)
        assert len(await one.claim(room=1000)) == more


async def test_a_changed_rate_counts_as_many_starts_as_it_allows_at_once(address: str) -> None:
    """Its burst, and what the tolerance adds to it."""
    async with engine_harness(address, declare(rate="1000/d", burst=1000)) as here:
        used = "UPDATE actions SET rate_used_until = clock_timestamp() + interval '1 day' RETURNING clock_timestamp()"
        ((before,),) = await here.sql(used)
        await change(here, rate="1000/s")
        ((used_until, after),) = await here.sql("SELECT rate_used_until, clock_timestamp() FROM actions")
        at_once = timedelta(milliseconds=1 + 1000 * RATE_TOLERANCE)
        assert before + at_once <= used_until <= after + at_once


async def test_a_rate_can_be_changed_however_long_no_run_has_started(address: str) -> None:
    async with engine_harness(address, declare(rate="1000/s")) as here:
        await here.trigger(*[Order("tick")] * 10)
        await here.sql("UPDATE actions SET rate_used_until = clock_timestamp() - interval '300 days' RETURNING 1")
        await change(here, rate="1/d")
        assert len(await (await here.instance("one")).claim()) == 1


async def test_a_limit_of_one_action_does_not_limit_other_actions(address: str) -> None:
    async with engine_harness(address, declare("tight", concurrency=1), declare("tick")) as here:
        await here.trigger(*[Order("tight", priority=9)] * 50)
        await here.trigger(*[Order("tick")] * 50)
        assert len(await (await here.instance("one")).claim(room=60)) == 51


async def test_each_claim_of_a_run_gets_a_higher_token(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        await here.trigger(Order("tick"))
        one = await here.instance("one")
        tokens = []
        for _ in range(3):
            ((_, token, _),) = await one.claim()
            tokens.append(token)
            # A pause lowers the attempt number. The token only grows.
            await here.sql("UPDATE runs SET state = 'pending', attempt = 0 RETURNING 1")
        assert tokens == [1, 2, 3]


async def test_after_the_last_due_run_the_backlog_knows_the_next_due_time(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        now = asyncio.get_running_loop().time()
        later = datetime.now(UTC) + timedelta(hours=1)
        one = await here.instance("one")
        await one.claim()
        await here.trigger(Order("tick"), Order("tick", run_at=later))
        one.backlog.add(here.catalogue.id_of("tick"), 0, later, now)
        assert len(await one.claim()) == 1
        due = one.backlog.next_due()
        assert due is not None
        assert 3500 < due - now < 3700


# -- the floor --------------------------------------------------------------------------------------------------------


async def notify(one: Claiming, name: str, run_at: datetime) -> None:
    now = asyncio.get_running_loop().time()
    one.backlog.add(one.harness.catalogue.id_of(name), 0, run_at, now)


async def test_a_claim_does_not_read_the_index_entries_of_ended_runs(address: str) -> None:
    """While a snapshot is open, the index keeps the entries of all earlier runs; the plan shows how many are read."""
    async with engine_harness(address, declare()) as here:
        one = await here.instance("one")
        with psycopg.connect(address) as reader:
            reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            reader.execute("SELECT 1")
            for _ in range(40):
                await here.trigger(*[Order("tick")] * 50)
                assert len(await one.claim()) == 50
                await here.sql("DELETE FROM runs RETURNING 1")
            floor = one.backlog._queues[QueueKey(here.catalogue.id_of("tick"), 0)].floor
            explain = """
                EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, SUMMARY OFF, FORMAT JSON)
                SELECT id FROM runs
                WHERE state = 'pending' AND ordering_key IS NULL AND action_id = %s AND priority = 0
                  AND run_at >= %s AND run_at <= now()
                ORDER BY run_at, id LIMIT 10
            """
            blocks = []
            for since in (datetime(2020, 1, 1, tzinfo=UTC), floor):
                ((plan,),) = await here.sql(explain, here.catalogue.id_of("tick"), since)
                blocks.append(plan[0]["Plan"]["Shared Hit Blocks"])
        assert blocks[0] > 5 * blocks[1], (
            "a read from the beginning reads all old entries, a read from the floor reads none"
        )


async def test_a_notification_of_a_run_from_before_the_floor_lowers_the_floor(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        one = await here.instance("one")
        await one.claim()
        with psycopg.connect(address) as slow:
            ((began,),) = slow.execute("SELECT now()").fetchall()
            await here.trigger(Order("tick"))
            assert len(await one.claim()) == 1
            insert = "INSERT INTO flotilla.runs (action_id, priority, run_at, max_attempts, trigger)"
            slow.execute(f"{insert} VALUES (%s, 0, now(), 1, 'code')", [here.catalogue.id_of("tick")])
        await notify(one, "tick", datetime.now(UTC) + timedelta(hours=1))
        await notify(one, "tick", began)
        assert len(await one.claim(everywhere=False)) == 1


async def test_a_notification_during_a_claim_keeps_its_queue_due(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        one = await here.instance("one")
        ((began,),) = await here.sql("SELECT now()")
        backlog = one.backlog
        await notify(one, "tick", began)
        backlog.begin_claim()
        await notify(one, "tick", began - timedelta(seconds=1))
        queue_key = QueueKey(here.catalogue.id_of("tick"), 0)
        backlog.exhausted(queue_key, began, backlog.end_claim().get(queue_key))
        assert backlog.due(asyncio.get_running_loop().time())
        assert backlog._queues[queue_key].floor == began - timedelta(seconds=1)


async def test_many_due_queues_are_divided_among_the_instances(address: str) -> None:
    actions = [declare(f"tick-{number}") for number in range(MANY + 50)]
    async with engine_harness(address, *actions) as here:
        await here.trigger(*[Order(each.name) for each in actions])
        ((began, server_now),) = await here.sql("SELECT min(run_at), clock_timestamp() FROM runs")
        all_queues = [(identifier, 0, began) for identifier in here.catalogue.ids]
        now = asyncio.get_running_loop().time()
        parts = []
        for ours in range(3):
            one = await here.instance(f"i-{ours}")
            one.clock.learn(server_now, now)
            one.backlog.part = (ours, 3)
            others = one.backlog.add_all(all_queues, now)
            parts.append({queue_key[0] for queue_key, _ in one.backlog.due(now)})
            assert {queue_key[0] for queue_key in others} == set(here.catalogue.ids) - parts[-1]
        assert [len(part) for part in parts] == [len(set(all_queues)) // 3 + (ours == 1) for ours in range(3)]
        assert set.union(*parts) == set(here.catalogue.ids)
        assert len(await one.claim(room=len(actions), everywhere=False)) == len(parts[2])


async def test_a_few_due_queues_are_due_for_every_instance(address: str) -> None:
    actions = [declare(f"tick-{number}") for number in range(4)]
    async with engine_harness(address, *actions) as here:
        one = await here.instance("one")
        one.backlog.part = (2, 3)
        now = asyncio.get_running_loop().time()
        assert not one.backlog.add_all([(each, 0, datetime.now(UTC)) for each in here.catalogue.ids], now)
        one.clock.learn(datetime.now(UTC), now)
        assert len(one.backlog.due(now + 0.001)) == 4


async def test_a_completion_finds_its_rows_by_their_ids_even_if_it_was_planned_on_an_empty_table(address: str) -> None:
    """With an empty table, a scan of the whole index looks cheap; while a snapshot is open, such a scan is long."""
    async with engine_harness(address, declare()) as here:
        one, dedicated, finish = (
            await here.instance("one"),
            here.database.dedicated(),
            here.database.namespace.sql(FINISH),
        )
        with psycopg.connect(address, autocommit=True) as other:
            other.execute("VACUUM ANALYZE flotilla.runs")
        await here.trigger(*[Order("tick")] * 50)
        runs = await one.claim()
        values = {"ids": array(run.run_id for run in runs), "tokens": array(run.token for run in runs)}
        async with dedicated.connection() as connection:
            await connection.execute(finish, {**values, "states": None, "results": None, "errors": None})
            known = await connection.execute("SELECT name FROM pg_prepared_statements WHERE statement ~ 'ended AS \\('")
            ((name,),) = await known.fetchall()
            assert await (await connection.execute("SHOW enable_nestloop")).fetchone() == ("off",)
            explain = f"EXPLAIN (FORMAT JSON) EXECUTE {name} ('{{1}}', '{{1}}', NULL, NULL, NULL)"
            ((plan,),) = await (await connection.execute(explain, prepare=False)).fetchall()
        await dedicated.close()
        found = [scan.get("Index Cond") or scan["Recheck Cond"] for scan in scans(plan[0]["Plan"], "runs")]
        assert {condition.partition(" = ANY ")[0] for condition in found} == {"(id"}
        assert "Nested Loop" not in str(plan), "the runs of the batch are not compared one by one with all rows"


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan] + [node for part in plan.get("Plans", []) for node in nodes(part)]


def scans(plan: dict[str, Any], relation: str) -> list[dict[str, Any]]:
    """Return the nodes of a plan that read this table."""
    own = [plan] if plan.get("Relation Name") == relation and "Scan" in plan["Node Type"] else []
    return own + [scan for part in plan.get("Plans", []) for scan in scans(part, relation)]
