"""The feed: every change of state, in the same order for all readers; a change that commits late is not skipped."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest

from app.fleet.db.pool.pool import Connection
from app.fleet.db.pool.statements import fetch
from app.fleet.engine.enqueue.insert import insert
from app.fleet.engine.enqueue.orders import Order, Origin, prepare
from app.fleet.http import events as http_events
from app.fleet.runs.effects import feed_numbers, feed_pruner
from app.fleet.runs.effects.feed import Batch, Change, read_batches
from app.fleet.runs.effects.feed_numbers import Numberer, Numbering
from app.fleet.runs.effects.feed_pruner import FeedPruner
from tests.integration.test_edge import is_problem
from tests.support.engine_harness import NAMESPACE, EngineHarness, declare, engine_harness
from tests.support.postgres import BOUND
from tests.support.runs import LocalInstance, local_instance, soon
from tests.support.streams import Message, messages

pytestmark = pytest.mark.anyio

CODE = Origin("code")


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address) as own:
        yield own


async def changes(here: LocalInstance | EngineHarness, after: int = 0) -> list[Change]:
    """Assign numbers to the rows of the feed, and return the changes after this number."""
    database = here.running.context.database if isinstance(here, LocalInstance) else here.database
    found: list[Change] = []
    async with database.connection() as connection:
        last = (await Numberer().step(connection, NAMESPACE)).last_number
        while batches := await read_batches(connection, NAMESPACE, after + len(found)):
            found += [change for batch in batches for change in batch.after(after)]
    assert [change.number for change in found] == list(range(after + 1, last + 1))
    return found


def states(found: list[Change], run_id: int) -> list[tuple[int, str, int]]:
    return [(each.seq, each.state, each.attempt) for each in found if each.run_id == run_id]


async def test_every_change_of_state_is_in_the_feed_with_its_event_number(here: LocalInstance) -> None:
    good, bad = await here.run("echo"), await here.run("fail")
    await here.running.client.post("/actions/echo/pause")
    waiting = await here.trigger("echo")
    await here.running.client.post(f"/runs/{waiting}/cancel")
    await here.running.client.post(f"/runs/{waiting}/retry")
    found = await changes(here)
    assert states(found, good.id) == [(1, "pending", 0), (2, "running", 1), (3, "succeeded", 1)]
    assert [state for _, state, _ in states(found, bad.id)] == ["pending", "running"] * 3 + ["failed"]
    assert states(found, waiting) == [(1, "pending", 0), (2, "cancelled", 0), (3, "pending", 0)]
    assert {each.instance for each in found if each.state in {"running", "succeeded"}} == {good.instance}


async def test_a_reader_does_not_skip_a_change_that_commits_late(address: str) -> None:
    """Two transactions by hand: the one that began first, and whose run has the lower id, commits last."""
    async with engine_harness(address, declare()) as here:
        order = prepare(here.catalogue, Order("tick"))
        async with here.database.connection() as slow:
            (early,) = await insert(slow, NAMESPACE, [order], CODE)
            (late,) = await here.trigger(Order("tick"))
            # A reader reads between the two commits.
            seen = await changes(here)
            assert [each.run_id for each in seen] == [late]
        assert early.id < late
        rest = await changes(here, after=seen[-1].number)
        assert [each.run_id for each in rest] == [early.id], "its row is older, and its number is higher"
        rows = await here.sql("SELECT id, first FROM feed ORDER BY id")
        assert [first for _, first in rows] == [2, 1]


async def test_a_reader_without_the_lock_assigns_no_numbers_and_does_not_wait(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second reader sees a row that the holder of the lock does not see, and would assign the same number to it."""
    async with engine_harness(address, declare()) as here:
        order = prepare(here.catalogue, Order("tick"))
        genuine, others = fetch, list[Numbering]()

        async def meanwhile(connection: Connection, statement: bytes, values: Any = None) -> Any:
            found = await genuine(connection, statement, values)
            if statement == NAMESPACE.sql(feed_numbers.ASSIGN_NUMBERS) and not others:
                await here.trigger(Order("tick"))
                others.append(await assign_numbers(here))
            return found

        async with here.database.connection() as slow:
            await insert(slow, NAMESPACE, [order], CODE)
            (late,) = await here.trigger(Order("tick"))
            monkeypatch.setattr(feed_numbers, "fetch", meanwhile)
            assert await assign_numbers(here) == Numbering(1, complete=True, busy=False, enabled=True)
        assert others == [Numbering(0, complete=False, busy=True, enabled=True)]
        assert [each.run_id for each in await changes(here)] == [late, late - 1, late + 1]


async def test_numbers_are_assigned_in_a_transaction_also_on_an_autocommit_connection(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a transaction, the lock would be released at once, and two readers could assign the same number."""
    async with engine_harness(address, declare()) as here:
        await here.trigger(Order("tick"))
        genuine, others = fetch, list[Numbering]()

        async def meanwhile(connection: Connection, statement: bytes, values: Any = None) -> Any:
            if statement == NAMESPACE.sql(feed_numbers.ASSIGN_NUMBERS) and not others:
                others.append(Numbering(0, complete=False, busy=False, enabled=True))
                others.append(await assign_numbers(here))
            return await genuine(connection, statement, values)

        monkeypatch.setattr(feed_numbers, "fetch", meanwhile)
        async with here.database.autocommit() as connection:
            assert (await Numberer().step(connection, NAMESPACE)).last_number == 1
        assert others[1].busy


async def assign_numbers(here: EngineHarness, numbers: Numberer | None = None) -> Numbering:
    async with here.database.connection() as connection:
        return await (numbers or Numberer()).step(connection, NAMESPACE)


async def test_numbering_in_several_transactions_keeps_the_order_of_each_run(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps, a change commits below the numbered rows, and a later change of the same run above them."""
    monkeypatch.setattr(
        feed_numbers, "ASSIGN_NUMBERS", feed_numbers.ASSIGN_NUMBERS.replace(str(feed_numbers.NUMBERED_AT_ONCE), "2")
    )
    monkeypatch.setattr(feed_numbers, "NUMBERED_AT_ONCE", 2)
    async with engine_harness(address, declare()) as here:
        one, numbers = await here.instance("one"), Numberer()
        order = prepare(here.catalogue, Order("tick"))
        async with here.database.connection() as slow:
            (early,) = await insert(slow, NAMESPACE, [order], CODE)
            for _ in range(5):
                await here.trigger(Order("tick"))
            assert await assign_numbers(here, numbers) == Numbering(2, complete=False, busy=False, enabled=True)
        assert early.id in {run.run_id for run in await one.claim()}
        while not (given := await assign_numbers(here, numbers)).complete:
            pass
        assert given.last_number == 5, "the round numbers no row that was inserted after its beginning"
        while not (given := await assign_numbers(here, numbers)).complete:
            pass
        assert given.last_number == 12
        found = await changes(here)
        assert states(found, early.id) == [(1, "pending", 0), (2, "running", 1)]


async def prune(here: EngineHarness, pruner: FeedPruner | None = None) -> None:
    pruner = pruner or FeedPruner()
    async with here.database.autocommit() as connection:
        while await pruner.step(connection, NAMESPACE):
            pass


AGE = "UPDATE feed SET at = at - interval '11 minutes' RETURNING 1"


async def test_the_feed_keeps_counting_after_old_rows_are_pruned(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        for _ in range(3):
            await here.trigger(Order("tick"))
        await changes(here)
        await here.sql(AGE)
        await prune(here)
        assert await here.sql("SELECT first FROM feed") == [(3,)], (
            "the last row is kept, because the next number follows from it"
        )
        await here.trigger(Order("tick"))
        assert [each.number for each in await changes(here, after=2)] == [3, 4]


async def test_a_reader_that_reconnects_finds_rows_pruned_unread_as_missing(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        await here.trigger(Order("tick"))
        assert len(await changes(here)) == 1
        await here.trigger(*[Order("tick")] * 5)
        await here.trigger(Order("tick"))
        await here.sql(AGE)
        await prune(here)
        await here.trigger(Order("tick"))
        assert (await assign_numbers(here)).last_number == 8
        async with here.database.connection() as connection:
            unread, news = await read_batches(connection, NAMESPACE, 1)
        assert (unread.first, unread.seq, unread.after(1), unread.missing(1)) == (2, 7, [], 7)
        assert (news.first, news.missing(7)) == (8, 7)


async def test_numbering_reads_no_more_rows_than_it_numbers_with_outdated_statistics(address: str) -> None:
    """The rows are not stored in the order of their ids, and nearly all had a number when the table was analyzed."""
    rows = """
        INSERT INTO feed (id, first, state, many, runs, actions, seqs, attempts) OVERRIDING SYSTEM VALUE
        SELECT n, {first}, 'pending', 1, ARRAY[n], ARRAY[1], ARRAY[1], ARRAY[0]
        FROM generate_series({begin}, {end}) AS n
        ORDER BY random()
    """
    async with engine_harness(address, declare()) as here:
        await here.sql(rows.format(first="CASE WHEN n % 200 > 0 THEN n END", begin=1, end=20000))
        await here.sql("ANALYZE feed")
        await here.sql(rows.format(first="NULL", begin=20001, end=40000))
        async with here.database.connection() as connection:
            await connection.execute(NAMESPACE.sql(feed_numbers.TRY_LOCK))
            explain = b"EXPLAIN (ANALYZE, FORMAT JSON) " + NAMESPACE.sql(feed_numbers.ASSIGN_NUMBERS)
            ((plan,),) = await (
                await connection.execute(explain, {"after": 0, "top": feed_numbers.HIGHEST_ID})
            ).fetchall()
        read = max(node["Actual Rows"] * node["Actual Loops"] for node in nodes(plan[0]["Plan"]))
        assert read <= feed_numbers.NUMBERED_AT_ONCE


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)


async def test_a_feed_that_ends_with_a_full_batch_of_old_rows_is_pruned(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_pruner, "FIND_OLD", feed_pruner.FIND_OLD.replace(str(feed_pruner.PRUNED_AT_ONCE), "2"))
    monkeypatch.setattr(feed_pruner, "PRUNED_AT_ONCE", 2)
    async with engine_harness(address, declare()) as here:
        for _ in range(4):
            await here.trigger(Order("tick"))
        assert (await assign_numbers(here)).last_number == 4
        await here.sql(AGE)
        pruner = FeedPruner()
        for _ in range(3):
            await prune(here, pruner)
            assert await here.sql("SELECT first FROM feed") == [(4,)]


async def test_pruning_a_feed_without_readers_uses_up_the_numbers_of_its_rows(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_pruner, "FIND_OLD", feed_pruner.FIND_OLD.replace(str(feed_pruner.PRUNED_AT_ONCE), "2"))
    monkeypatch.setattr(feed_pruner, "PRUNED_AT_ONCE", 2)
    async with engine_harness(address, declare()) as here:
        pruner = FeedPruner()
        for _ in range(5):
            await here.trigger(Order("tick"))
        await here.sql(AGE)
        await here.trigger(Order("tick"))
        await prune(here, pruner)
        assert await here.sql("SELECT first, many, state FROM feed ORDER BY id") == [
            (None, 1, "pending"),
            (1, 2, "unread"),
            (3, 2, "unread"),
            (5, 1, "unread"),
        ]
        # With each further prune, only the last of the unread rows is kept.
        await here.sql(AGE)
        await prune(here, pruner)
        assert await here.sql("SELECT first, many FROM feed") == [(6, 1)]
        await here.trigger(Order("tick"))
        assert (await assign_numbers(here)).last_number == 7


async def test_a_row_that_commits_late_is_pruned_although_later_rows_were_pruned_before(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        pruner, order = FeedPruner(), prepare(here.catalogue, Order("tick"))
        async with here.database.connection() as slow:
            await insert(slow, NAMESPACE, [order], CODE)
            for _ in range(3):
                await here.trigger(Order("tick"))
            await assign_numbers(here)
            await here.sql(AGE)
            for _ in range(3):
                await prune(here, pruner)
            assert pruner._floor.id == 0, "an open transaction may have a row with a lower id"
        await assign_numbers(here)
        await here.sql(AGE)
        for _ in range(3):
            await prune(here, pruner)
        assert await here.sql("SELECT first FROM feed") == [(4,)]


async def test_the_floor_of_the_pruner_rises_and_stays_below_the_last_row(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        pruner = FeedPruner()
        for _ in range(3):
            await here.trigger(Order("tick"), Order("tick"))
            await assign_numbers(here)
            await here.sql(AGE)
            await prune(here, pruner)
            ((kept,),) = await here.sql("SELECT id FROM feed")
            assert pruner._floor.id < kept
        assert pruner._floor.id > 0


async def test_the_pruner_does_not_wait_for_the_numbering_lock(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        await here.trigger(Order("tick"))
        await here.sql(AGE)
        pruner = FeedPruner()
        async with here.database.connection() as reader, here.database.autocommit() as connection:
            await reader.execute(NAMESPACE.sql(feed_numbers.TRY_LOCK))
            assert await pruner.step(connection, NAMESPACE)
            assert len(await here.sql("SELECT 1 FROM feed WHERE first IS NULL")) == 1
        await prune(here, pruner)
        assert await here.sql("SELECT first, state FROM feed") == [(1, "unread")]


async def test_a_change_that_commits_very_late_is_numbered_before_the_changes_that_follow_from_it(address: str) -> None:
    """Numbering reads rows above a floor, which stays below the rows that an open transaction may have."""
    async with engine_harness(address, declare()) as here:
        order, numbers = prepare(here.catalogue, Order("tick")), Numberer()
        one = await here.instance("one")

        async def next_last_number() -> int:
            return (await assign_numbers(here, numbers)).last_number

        for last in range(1, 4):
            await here.trigger(Order("tick"))
            assert await next_last_number() == last
        assert numbers._floor.id > 0
        async with here.database.connection() as slow:
            (early,) = await insert(slow, NAMESPACE, [order], CODE)
            for last in range(4, 8):
                await here.trigger(Order("tick"))
                assert await next_last_number() == last
        claimed = await one.claim()
        assert len(claimed) == 8
        last = await next_last_number()
        found = await changes(here)
        assert len(found) == last == 16
        for run_id in {run.run_id for run in claimed}:
            assert [state for _, state, _ in states(found, run_id)] == ["pending", "running"]
        assert early.id in {run.run_id for run in claimed}
        # The next step begins above all of these rows.
        await next_last_number()
        await next_last_number()
        assert await here.sql("SELECT max(id) FROM feed") == [(numbers._floor.id,)]


async def test_rows_are_numbered_again_if_the_numbering_transaction_fails(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_harness(address, declare()) as here:
        order, numbers = prepare(here.catalogue, Order("tick")), Numberer()
        async with here.database.connection() as slow:
            await insert(slow, NAMESPACE, [order], CODE)
            await here.trigger(Order("tick"))
            assert (await assign_numbers(here, numbers)).last_number == 1
        # This step finds the late row, below the numbered ones, and then fails.
        genuine = fetch

        async def fail(connection: Connection, statement: bytes, values: Any = None) -> Any:
            found = await genuine(connection, statement, values)
            if statement == NAMESPACE.sql(feed_numbers.ASSIGN_NUMBERS):
                assert found[0][0] == 2
                raise psycopg.OperationalError("the connection broke before the response")
            return found

        with monkeypatch.context() as patch, pytest.raises(psycopg.OperationalError):
            patch.setattr(feed_numbers, "fetch", fail)
            await assign_numbers(here, numbers)
        for _ in range(3):
            assert (await assign_numbers(here, numbers)).last_number == 2
        assert len(await changes(here)) == 2


async def test_with_the_feed_switched_off_no_feed_row_is_written(address: str) -> None:
    async with local_instance(address, feed_retention=0) as here:
        await here.run("echo")
        assert await here.sql("SELECT * FROM feed") == []
        is_problem(await here.running.client.get("/events"), "not-found")


async def test_all_followers_receive_the_same_changes_wherever_they_begin(here: LocalInstance) -> None:
    hub = here.running.context.stream.hub
    await here.run("echo")
    async with hub.follow_feed(0) as first, hub.follow_feed() as second:
        run_ids = [(await here.run("echo")).id for _ in range(3)]
        before = second.seq
        everything, news = await collect(first, 0, 12), await collect(second, before, 9)
        assert everything[3:] == news
        assert {each.run_id for each in news} == set(run_ids)
    async with hub.follow_feed(everything[4].number) as third:
        assert await collect(third, everything[4].number, 7) == everything[5:]


async def collect(following: Any, after: int, count: int) -> list[Change]:
    found: list[Change] = []
    while len(found) < count:
        batches: list[Batch] = await following.more(BOUND)
        assert batches
        for batch in batches:
            found += batch.after(found[-1].number if found else after)
    return found


async def read(here: LocalInstance, path: str = "/events", last: str = "0") -> list[Message]:
    """Read a stream until it ends because of its maximum age."""
    answer = await here.running.client.get(path, headers={"Last-Event-ID": last})
    assert answer.status_code == 200, answer.text
    return [message for message in messages(answer.text.splitlines()) if message.retry is None]


async def test_a_stream_has_the_requested_changes_after_the_given_number(address: str) -> None:
    async with local_instance(address, stream_age=0.3) as here:
        run, other = await here.run("echo"), await here.run("fail")
        everything = await read(here)
        assert [message.id for message in everything] == [str(number) for number in range(1, len(everything) + 1)]
        assert {message.event for message in everything} == {"state"}
        first = everything[0].data
        assert first | {"at": None} == {
            "run": run.id,
            "action": "echo",
            "seq": 1,
            "kind": "state",
            "data": {"state": "pending", "attempt": 0, "instance": None},
            "at": None,
        }
        assert await read(here, last="4") == everything[4:]
        failed = await read(here, "/events?state=failed,cancelled")
        assert [(each.data["run"], each.data["data"]["state"]) for each in failed] == [(other.id, "failed")]
        echoes = await read(here, "/events?action=echo&action=noop")
        assert [each.data["seq"] for each in echoes] == [1, 2, 3]
        # A client whose filter matches no change receives a number to reconnect with.
        answer = await here.running.client.get("/events?action=noop")
        assert f"id: {len(everything)}\n" in answer.text


async def test_a_client_that_reconnects_too_late_receives_which_changes_it_missed(address: str) -> None:
    async with local_instance(address, stream_age=0.3) as here:
        for _ in range(3):
            await here.run("noop")
        assert len(await read(here)) == 9
        await here.sql("DELETE FROM feed WHERE first < 6 RETURNING 1")
        missed, *rest = await read(here, last="2")
        assert (missed.event, missed.id, missed.data) == ("missed", "5", {"after": 2, "until": 5})
        assert [each.id for each in rest] == ["6", "7", "8", "9"]
        # Rows that were pruned unread are reported too. The hub has ended its reads for the stream before.
        hub = here.running.context.stream.hub
        await soon(lambda: here.sql("SELECT 1 WHERE %s", hub._feed is None))
        async with hub.reader._newer:
            pass
        await here.run("noop")
        await here.sql("UPDATE feed SET at = at - interval '1 h' RETURNING 1")
        await here.engine.pruner.prune_feed()
        (missed,) = await read(here, last="9")
        assert (missed.event, missed.id, missed.data) == ("missed", "12", {"after": 9, "until": 12})


async def test_a_stream_without_matching_changes_still_sends_the_latest_number(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_events, "HEARTBEAT", 0.1)
    hub = here.running.context.stream.hub
    echo = here.engine.catalogue.id_of("echo")
    async with asyncio.timeout(60), hub.follow_feed() as follower:
        feed_filter = http_events.Filter({echo}, set(), hub.reader)
        chunks = http_events.feed_chunks(follower, feed_filter, http_events.Age(here.running.context))
        assert await anext(chunks) == b": up to here\nid: 0\n\n"
        await here.run("noop")
        output = b""
        while b"id: 3\n" not in output:
            output += await anext(chunks)
        assert b"event: " not in output


@pytest.mark.parametrize(
    ("path", "last", "slug"),
    [
        ("/events", "first", "bad-request"),
        ("/events", "99999", "bad-request"),
        ("/events?action=nothing", None, "not-found"),
        ("/events?state=lost", None, "invalid"),
    ],
)
async def test_an_invalid_request_for_a_stream_is_refused_before_the_stream_begins(
    here: LocalInstance, path: str, last: str | None, slug: str
) -> None:
    headers = {} if last is None else {"Last-Event-ID": last}
    is_problem(await here.running.client.get(path, headers=headers), slug)
