"""Many clients that follow at the same time cost the database, the pool and the event loop about as much as a few."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
import pytest

from app.fleet.cluster import link
from app.fleet.db.direct import DirectSession
from app.fleet.engine.enqueue.orders import Order
from app.fleet.errors import RunUnknown
from app.fleet.http import events as http_events
from app.fleet.runs.effects import feed
from app.fleet.runs.effects.feed_numbers import TRY_LOCK, Numberer, Numbering
from app.fleet.stream import pacer, shared_read
from app.fleet.stream.pacer import Pacer
from app.fleet.stream.shared_read import SharedRead
from tests.integration.test_feed import collect as collect_feed
from tests.integration.test_run_streams import collect
from tests.support.runs import LocalInstance, local_instance, soon
from tests.support.streams import messages

pytestmark = pytest.mark.anyio
CLIENTS = 1500
# Longer than a busy machine needs for so many clients in one process.
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests count statements and connections. Neither a slow event loop nor a starved thread may end a wait.

    On a busy machine, clients in this process can take more than ten seconds of the event loop's time, and more than
    five of the link's. `tests/instances/test_abuse.py` opens as many from another process, with the real limits.
    """
    monkeypatch.setattr(shared_read, "READ_TIMEOUT", PATIENCE)
    monkeypatch.setattr(link, "PATIENCE", PATIENCE)
    monkeypatch.setattr(link, "LEASE", 2 * PATIENCE)
    monkeypatch.setattr(DirectSession, "patience", PATIENCE)


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address) as own:
        yield own


@contextmanager
def record_calls(owner: object, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """Record the arguments of the calls of this method of the object."""
    genuine, calls = getattr(owner, name), list[tuple[Any, ...]]()

    async def call(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return await genuine(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield calls


@contextmanager
def count_borrowed(here: LocalInstance) -> Iterator[list[int]]:
    """Record the maximum number of connections that the hub has at the same time."""
    hub = here.running.context.stream.hub
    genuine, now, maximum = hub.reader._database.autocommit, 0, [0]

    @asynccontextmanager
    async def borrow() -> AsyncIterator[Any]:
        nonlocal now
        now += 1
        maximum[0] = max(maximum[0], now)
        try:
            async with genuine() as connection:
                yield connection
        finally:
            now -= 1

    class Counting:
        namespace = hub.reader._database.namespace
        autocommit = staticmethod(borrow)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub.reader, "_database", Counting())
        yield maximum


async def test_very_many_clients_can_open_the_feed_at_once_while_runs_are_triggered(address: str) -> None:
    async with local_instance(address, stream_age=1.0) as here:
        client, hub = here.running.client, here.running.context.stream.hub
        before = (await here.run("echo")).id
        with count_borrowed(here) as maximum, record_calls(hub.reader.feed_starts, "_read") as reads:
            streams = [asyncio.create_task(client.get("/events?action=echo")) for _ in range(CLIENTS)]
            writers = [asyncio.create_task(client.post("/actions/echo/runs", json={})) for _ in range(150)]
            assert {answer.status_code for answer in await asyncio.gather(*writers)} == {202}
            answers = await asyncio.gather(*streams)
        assert {answer.status_code for answer in answers} == {200}
        assert maximum[0] <= 2
        assert len(reads) < CLIENTS / 10
        # Each client receives all changes since it connected.
        for answer in answers[:: CLIENTS // 10]:
            seen = [message for message in messages(answer.text.splitlines()) if message.event == "state"]
            numbers = [int(message.id or 0) for message in seen]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
            assert before not in {message.data["run"] for message in seen}


async def test_clients_that_follow_runs_at_the_same_time_share_statements(here: LocalInstance) -> None:
    hub = here.running.context.stream.hub
    run_ids = await here.trigger_all([Order("noop")] * 60)
    for run_id in run_ids:
        await here.ended(run_id)
    with count_borrowed(here) as maximum, record_calls(hub.reader.first_pages, "_read") as reads:
        followers = [asyncio.create_task(collect(here, run_ids[place % 60])) for place in range(600)]
        stories = await asyncio.gather(*followers)
    assert {len(story) for story in stories} == {3}
    assert len(reads) == 2, "at most fifty runs in each read"
    assert maximum[0] <= 2
    assert hub.followed == 0
    assert hub._total_weight == 0


async def test_clients_of_one_run_that_begin_at_different_events_share_one_read(here: LocalInstance) -> None:
    hub = here.running.context.stream.hub
    run = await here.run("speak")
    with record_calls(hub.reader.first_pages, "_read") as reads:
        stories = await asyncio.gather(*(collect(here, run.id, after) for after in (4, 0, 6, 2)))
    assert [[event.seq for event in story] for story in stories] == [[5, 6], [1, 2, 3, 4, 5, 6], [], [3, 4, 5, 6]]
    assert len(reads) == 1


async def test_clients_that_reconnect_with_the_same_number_share_one_read(here: LocalInstance) -> None:
    """As after a deploy: the channel begins at the number they reconnect with, and one read serves all of them."""
    hub = here.running.context.stream.hub
    for _ in range(4):
        await here.run("noop")

    async def reconnect() -> list[feed.Change]:
        async with hub.follow_feed(3) as follower:
            await together.wait()
            return await collect_feed(follower, 3, 9)

    together = asyncio.Barrier(50)
    with record_calls(feed, "read_batches") as reads:
        stories = await asyncio.gather(*(reconnect() for _ in range(50)))
    assert all(story == stories[0] for story in stories)
    assert len([given for given in reads if given[2] == 3]) == 1


async def test_a_client_that_disconnects_during_a_shared_read_does_not_end_it(here: LocalInstance) -> None:
    hub = here.running.context.stream.hub
    run = await here.run("noop")
    first, second = (asyncio.create_task(collect(here, run.id)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert len(await second) == 3
    assert first.cancelled()
    with pytest.raises(RunUnknown):
        await collect(here, 987654)
    assert hub.followed == 0


async def test_all_callers_of_a_shared_read_get_its_error_and_the_next_read_is_new() -> None:
    asked: list[list[int]] = []

    async def read(these: Any) -> dict[int, str]:
        asked.append(list(these))
        await asyncio.sleep(0)
        if len(asked) == 1:
            raise psycopg.OperationalError("the connection broke")
        return {each: f"answer to {each}" for each in these if each != 3}

    shared = SharedRead(read, 2)
    answers = await asyncio.gather(*(shared.get(each) for each in (1, 1, 2, 3)), return_exceptions=True)
    assert [type(answer) for answer in answers[:3]] == [psycopg.OperationalError] * 3
    assert answers[3] is None
    assert asked == [[1, 2], [3]]
    assert await shared.get(1) == "answer to 1"
    assert shared._task is None
    await shared.stop()


async def test_numbering_that_violates_the_unique_index_is_tried_again(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_instance(address, stream_age=0.2) as here:
        genuine, failed = Numberer.step, list[bool]()

        async def step(*given: Any) -> Numbering:
            if not failed:
                failed.append(True)
                raise psycopg.errors.UniqueViolation("feed_first")
            return await genuine(*given)

        monkeypatch.setattr(Numberer, "step", step)
        assert (await here.running.client.get("/events")).status_code == 200
        assert failed


async def test_while_another_session_has_the_numbering_lock_only_the_feed_waits(here: LocalInstance) -> None:
    """The other session is like a frozen reader that holds the lock until the server ends its session."""
    hub, database = here.running.context.stream.hub, here.running.context.database
    await here.run("noop")
    async with hub.follow_feed(0) as follower:
        assert len(await collect_feed(follower, 0, 3)) == 3
        async with database.connection() as frozen:
            await frozen.execute(database.namespace.sql(TRY_LOCK))
            run = await here.run("noop")
            assert len(await collect(here, run.id)) == 3
            opening = asyncio.create_task(here.running.client.get("/events", headers={"Last-Event-ID": "999"}))
            assert follower.seq == 3
            assert await here.sql("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted") == []
        assert len(await collect_feed(follower, 3, 3)) == 3
        assert (await opening).status_code == 400


async def test_an_event_is_encoded_once_for_all_clients(here: LocalInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, context = here.running.context.stream.hub, here.running.context
    encoded: list[int] = []
    genuine = feed.Change.as_json

    def as_json(change: feed.Change, names: Mapping[int, str]) -> str:
        encoded.append(change.number)
        return genuine(change, names)

    monkeypatch.setattr(feed.Change, "as_json", as_json)

    async def read(feed_filter: http_events.Filter) -> bytes:
        output = b""
        async with hub.follow_feed(0) as follower:
            async for piece in http_events.feed_chunks(follower, feed_filter, http_events.Age(context)):
                output += piece
                if follower.seq >= 6:
                    return output
        raise AssertionError

    echo = here.engine.catalogue.id_of("echo")
    readers = [asyncio.create_task(read(http_events.Filter(set(), set(), hub.reader))) for _ in range(20)]
    readers += [asyncio.create_task(read(http_events.Filter({echo}, set(), hub.reader))) for _ in range(20)]
    await soon(lambda: here.sql("SELECT 1 WHERE %s", hub._feed is not None and hub._feed.followers == 40))
    await here.run("noop")
    await here.run("echo")
    everything = await asyncio.gather(*readers)
    assert len(set(everything[:20])) == 1
    assert len(set(everything[20:])) == 1
    assert [message.id for message in messages(everything[0].decode().splitlines())] == [str(n) for n in range(1, 7)]
    assert [message.id for message in messages(everything[20].decode().splitlines())] == ["4", "5", "6"]
    assert encoded == [1, 2, 3, 4, 5, 6]


async def test_the_pacer_resumes_a_few_clients_in_each_iteration_in_their_order() -> None:
    fair, served = Pacer(), list[int]()

    async def client(number: int) -> None:
        for _ in range(3):
            await fair.wait()
            served.append(number)

    clients = [asyncio.create_task(client(number)) for number in range(100)]
    maximum = before = 0
    while not all(each.done() for each in clients):
        await asyncio.sleep(0)
        maximum, before = max(maximum, len(served) - before), len(served)
    assert maximum == pacer.RESUMED_PER_ITERATION
    assert served == list(range(100)) * 3


async def test_the_pacer_defers_clients_while_the_loop_is_busy_but_not_without_end() -> None:
    busy = [True] * 3
    fair = Pacer(2, lambda: bool(busy) and busy.pop())
    clients = [asyncio.create_task(fair.wait()) for _ in range(4)]
    served = []
    for _ in range(7):
        await asyncio.sleep(0)
        served.append(sum(each.done() for each in clients))
    assert served == [0, 0, 0, 0, 0, 2, 4]

    fair = Pacer(2, lambda: True)
    client = asyncio.create_task(fair.wait())
    for _ in range(pacer.MAX_DEFERRALS + 3):
        assert not client.done()
        await asyncio.sleep(0)
    assert client.done()


async def test_memory_of_all_followed_runs_is_bounded_and_no_client_misses_an_event(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    maximum = 300_000
    monkeypatch.setattr("app.fleet.stream.hub.MAX_RUNS_WEIGHT", maximum)
    hub = here.running.context.stream.hub
    run_ids = [await here.trigger("chatter", {"count": 40, "pause": 0.0, "padding": 2000}) for _ in range(6)]

    together = asyncio.Barrier(len(run_ids))

    async def watched(run_id: int) -> int:
        seen = 0
        async with hub.follow(run_id) as follower:
            while not follower.ended:
                seen += len(await follower.more(1))
                assert sum(each.weight for each in hub._weights) == hub._total_weight <= maximum
            again = await collect(here, run_id)
            assert [event.seq for event in again] == list(range(1, seen + 1))
            # All followers stay, with the events that their channels keep, until the last one is here.
            await together.wait()
        return seen

    assert await asyncio.gather(*(watched(run_id) for run_id in run_ids)) == [43] * 6
    assert hub._weights == {}
    assert hub._total_weight == 0
