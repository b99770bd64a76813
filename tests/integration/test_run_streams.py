"""The events of a run are numbered without gaps, however the run ends, and all followers receive the same events."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import psycopg
import pytest

from app.fleet.api_keys import make_key
from app.fleet.engine.actions.run import MAX_EVENT
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.maintenance import rescuer
from app.fleet.http.events import Age, run_chunks
from app.fleet.runs.cancel import cancel_run
from app.fleet.runs.effects.events import PAGE_BYTES, Event, EventPage, StoredEvent, append, read_pages
from app.fleet.stream.channel import MAX_WEIGHT
from app.fleet.stream.relay import SPACING
from tests.integration.test_edge import is_problem
from tests.support.engine_harness import NAMESPACE, EngineHarness, declare, engine_harness
from tests.support.runs import LocalInstance, local_instance, soon
from tests.support.streams import messages

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address) as own:
        yield own


async def read_events(here: LocalInstance | EngineHarness, run_id: int, after: int = 0) -> list[StoredEvent]:
    database = here.running.context.database if isinstance(here, LocalInstance) else here.database
    async with database.connection() as connection:
        events = (await read_pages(connection, NAMESPACE, {run_id: after}))[run_id].events
    assert [event.seq for event in events] == list(range(after + 1, after + 1 + len(events)))
    return events


def states(events: list[StoredEvent]) -> list[tuple[str, int]]:
    return [(event.data["state"], event.data["attempt"]) for event in events if event.kind == "state"]


async def test_the_events_of_a_successful_run_are_derived_from_its_row_alone(here: LocalInstance) -> None:
    run = await here.run("echo", {"a": 1})
    events = await read_events(here, run.id)
    assert states(events) == [("pending", 0), ("running", 1), ("succeeded", 1)]
    assert [event.at for event in events] == [run.created_at, run.started_at, run.finished_at]
    assert events[1].data["instance"] == run.instance
    assert events[2].data["result"] == {"a": 1}
    assert await here.sql("SELECT * FROM run_events") == []


async def test_each_failed_attempt_of_a_run_is_an_event_with_its_error(here: LocalInstance) -> None:
    run = await here.run("fail")
    events = await read_events(here, run.id)
    assert states(events) == [
        ("pending", 0),
        ("running", 1),
        ("pending", 1),
        ("running", 2),
        ("pending", 2),
        ("running", 3),
        ("failed", 3),
    ]
    assert all("torn" in events[place].data["error"] for place in (2, 4, 6))
    assert events[2].data["run_at"] is not None
    assert [event.at for event in events] == sorted(event.at for event in events)


async def test_a_retry_on_request_continues_the_event_numbers_of_the_run(here: LocalInstance) -> None:
    run = await here.run("give-up")
    before = await read_events(here, run.id)
    await here.running.client.post(f"/runs/{run.id}/retry")
    assert (await here.ended(run.id)).state == "failed"
    after = await read_events(here, run.id)
    assert after[: len(before)] == before
    assert states(after[len(before) :]) == [("pending", 0), ("running", 1), ("failed", 1)]


async def test_a_run_that_is_cancelled_while_pending_has_no_running_event(here: LocalInstance) -> None:
    await here.running.client.post("/actions/echo/pause")
    run_id = await here.trigger("echo")
    await here.running.client.post(f"/runs/{run_id}/cancel")
    assert states(await read_events(here, run_id)) == [("pending", 0), ("cancelled", 0)]


async def test_emitted_events_are_between_the_changes_of_state(here: LocalInstance) -> None:
    run = await here.run("speak")
    events = await read_events(here, run.id)
    assert [event.kind for event in events] == ["state", "state", "log", "progress", "noted", "state"]
    assert events[2].data == {"level": "info", "text": "hello"}
    assert await read_events(here, run.id, after=3) == events[3:]


async def test_a_rescue_is_an_event_and_the_dead_instance_adds_no_event_after_it(address: str) -> None:
    async with engine_harness(address, declare()) as here:
        (run_id,) = await here.trigger(Order("tick"))
        one, two = await here.instance("one"), await here.instance("two")
        ((_, token, _),) = await one.claim()
        async with here.database.autocommit() as connection:
            await append(connection, NAMESPACE, [Event(run_id, token, "before", None)])
        await here.sql("UPDATE instances SET state = 'gone' WHERE name = 'one' RETURNING 1")
        async with here.database.autocommit() as connection:
            await rescuer.sweep(connection, NAMESPACE)
            late = Event(run_id, token, "late", None)
            assert await append(connection, NAMESPACE, [late]) == {(run_id, token)}
        await two.claim()
        events = await read_events(here, run_id)
        assert [event.kind for event in events] == ["state", "state", "before", "state", "state"]
        assert states(events) == [("pending", 0), ("running", 1), ("pending", 1), ("running", 2)]
        assert [event.data["instance"] for event in (events[1], events[3], events[4])] == ["one", "one", "two"]
        assert "died" in events[3].data["error"]


async def test_all_followers_of_a_run_receive_the_same_events_from_shared_reads(here: LocalInstance) -> None:
    hub = here.running.context.stream.hub
    run_id = await here.trigger("chatter", {"count": 50, "pause": 0.02})
    everything: list[list[StoredEvent]] = await asyncio.gather(*(collect(here, run_id) for _ in range(50)))
    assert len(everything[0]) == 53
    assert all(each == everything[0] for each in everything)
    # One read for each new follower, and then shared reads for all of them.
    assert hub.reader.reads < 50 + 120
    assert hub.followed == 0


async def collect(
    here: LocalInstance, run_id: int, after: int = 0, events: list[StoredEvent] | None = None
) -> list[StoredEvent]:
    events = [] if events is None else events
    async with asyncio.timeout(60), here.running.context.stream.hub.follow(run_id, after) as following:
        while not following.ended:
            events += await following.more(10)
    return events


async def test_a_new_follower_of_a_followed_run_needs_no_read_of_its_own(here: LocalInstance) -> None:
    hub = here.running.context.stream.hub
    run_id = await here.trigger("nap", {"seconds": 30})
    async with hub.follow(run_id) as first:
        while first.seq < 2:
            await first.more()
        page = hub.reader.event_pages
        requests: list[dict[int, int]] = []

        async def counted(request: dict[int, int]) -> Any:
            requests.append(dict(request))
            return await page(request)

        hub.reader.event_pages = counted  # type: ignore[method-assign,assignment]
        for after in (0, 1, 2):
            async with hub.follow(run_id, after) as late:
                known = await late.more(0.01)
                assert [event.seq for event in known] == list(range(after + 1, 3))
        # The only reads are those that the hub makes for all followers.
        assert all(request == {run_id: 2} for request in requests)
    await here.running.client.post(f"/runs/{run_id}/cancel")


async def test_a_late_follower_reads_events_that_left_memory_from_the_database(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.stream.channel.MAX_ITEMS", 10)
    run_id = await here.trigger("chatter", {"count": 700, "pause": 0.0})
    async with here.running.context.stream.hub.follow(run_id) as early:
        while not early.ended:
            await early.more()
        assert [event.seq for event in await collect(here, run_id)] == list(range(1, 704))
        assert [event.seq for event in await collect(here, run_id, 690)] == list(range(691, 704))


async def test_a_client_that_reads_too_slowly_must_reconnect_and_misses_no_event(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.stream.channel.MAX_ITEMS", 10)
    run_id = await here.trigger("nap", {"seconds": 600})
    attempt = await here.handle(run_id)
    hub = here.running.context.stream.hub
    async with hub.follow(run_id) as slow, hub.follow(run_id) as quick:
        chunks = run_chunks(slow, run_id, Age(here.running.context))
        output = b""
        while slow.seq < 2:
            output += await anext(chunks)
        # The client has read everything and waits. One event arrives, then many that the client does not read.
        waiting = asyncio.ensure_future(anext(chunks))
        await attempt.emit("first")
        output += await waiting
        for number in range(100):
            await attempt.emit("said", number)
        while quick.seq < 103:
            await quick.more()
        output += b"".join([chunk async for chunk in chunks])
    assert output.rstrip().splitlines()[-1].startswith(b"retry: ")
    assert b": this client reads too slowly: reconnect" in output
    seen = int(output.split(b"id: ")[-1].split()[0])
    assert 3 < seen <= 103
    await here.running.client.post(f"/runs/{run_id}/cancel")
    rest = await here.running.client.get(f"/runs/{run_id}/events", headers={"Last-Event-ID": str(seen)})
    assert [message.id for message in messages(rest.text.splitlines()) if message.id] == [
        str(seq) for seq in range(seen + 1, 105)
    ]


async def test_large_events_are_read_a_few_at_a_time_and_not_kept_in_memory(here: LocalInstance) -> None:
    run_id = await here.trigger("chatter", {"count": 60, "pause": 0.0, "padding": 60_000})
    hub = here.running.context.stream.hub
    async with hub.follow(run_id) as follower:
        max_weight = 0
        while not follower.ended:
            events = await follower.more()
            max_weight = max(max_weight, sum(event.weight for event in events))
            assert sum(event.weight for event in hub._runs[run_id].items) <= MAX_WEIGHT + MAX_EVENT
        assert follower.seq == 63
    assert max_weight <= MAX_WEIGHT + MAX_EVENT
    page = (await hub.reader.event_pages({run_id: 0}))[run_id]
    assert sum(len(event.text or "") for event in page.events) <= PAGE_BYTES + MAX_EVENT
    assert page.total == 63
    assert [event.seq for event in page.events] == list(range(1, len(page.events) + 1))


async def test_a_follower_that_catches_up_waits_through_an_outage_of_the_database(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.stream.channel.MAX_ITEMS", 10)
    run_id = await here.trigger("chatter", {"count": 100, "pause": 0.0})
    hub = here.running.context.stream.hub
    async with hub.follow(run_id) as early, hub.follow(run_id) as late:
        while not early.ended:
            await early.more()
        genuine, away = hub.reader.event_pages, [True, True]

        async def broken(*given: Any) -> Any:
            if away:
                away.pop()
                raise psycopg.OperationalError("the connection broke")
            return await genuine(*given)

        monkeypatch.setattr(hub.reader, "event_pages", broken)
        output = b"".join([chunk async for chunk in run_chunks(late, run_id, Age(here.running.context))])
    assert not away
    ids = [message.id for message in messages(output.decode().splitlines()) if message.id]
    assert ids == [str(seq) for seq in range(1, 104)]
    assert output.endswith(b'event: done\ndata: {"run":%d}\n\n' % run_id)


async def test_the_query_parameter_after_can_replace_the_last_event_id_header(here: LocalInstance) -> None:
    run = await here.run("speak")
    client, path = here.running.client, f"/runs/{run.id}/events?after=2"
    answer = await client.get(path)
    assert [message.id for message in messages(answer.text.splitlines()) if message.id] == ["3", "4", "5", "6"]
    # A browser that reconnects by itself sends the newer number in the header.
    answer = await client.get(path, headers={"Last-Event-ID": "4"})
    assert [message.id for message in messages(answer.text.splitlines()) if message.id] == ["5", "6"]
    is_problem(await client.get(f"/runs/{run.id}/events?after=x"), "bad-request")


async def test_a_stream_beyond_its_maximum_age_ends_with_a_reconnection_delay(address: str) -> None:
    async with local_instance(address, stream_age=0.2) as here:
        run_id = await here.trigger("nap", {"seconds": 600})
        # The run may begin later than a stream ends, so it begins before.
        await here.attempt(run_id)
        answer = await here.running.client.get(f"/runs/{run_id}/events")
        received = list(messages(answer.text.splitlines()))
        assert [message.event for message in received] == ["state", "state", "message"]
        assert received[-1].retry is not None
        assert 500 <= received[-1].retry <= 3000
        await here.running.client.post(f"/runs/{run_id}/cancel")


async def test_a_follower_whose_waits_time_out_leaves_no_waiter_behind(here: LocalInstance) -> None:
    run_id = await here.trigger("nap", {"seconds": 600})
    async with here.running.context.stream.hub.follow(run_id) as follower:
        while follower.seq < 2:
            await follower.more()
        for _ in range(5):
            assert await follower.more(0.01) == []
        assert not follower._channel._waiting
    await here.running.client.post(f"/runs/{run_id}/cancel")


async def test_the_streams_of_a_run_end_when_the_run_is_deleted(here: LocalInstance) -> None:
    await here.running.client.post("/actions/echo/pause")
    run_id = await here.trigger("echo")
    async with here.running.context.stream.hub.follow(run_id) as follower:
        assert len(await follower.more()) == 1
        await here.sql("DELETE FROM runs WHERE id = %s RETURNING 1", run_id)
        assert await follower.more(60) == []
        assert follower.pruned


async def test_events_are_notified_only_for_followed_runs_and_not_one_by_one(here: LocalInstance) -> None:
    relay = here.running.context.stream.relay
    await here.run("chatter", {"count": 20, "pause": 0.01})
    assert relay.sent == 0
    run_id = await here.trigger("chatter", {"count": 300, "pause": 0.001})
    began = time.monotonic()
    assert len(await collect(here, run_id)) == 303
    assert 0 < relay.sent < (time.monotonic() - began) / SPACING + 5, "fewer notifications than events"


async def test_without_polls_all_events_arrive_with_notifications(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.stream.hub.POLL_INTERVAL", 1e6)
    async with local_instance(address) as here:
        run_id = await here.trigger("fail")
        assert states(await collect(here, run_id))[-1] == ("failed", 3)
        run_id = await here.trigger("chatter", {"count": 20, "pause": 0.05})
        assert len(await collect(here, run_id)) == 23


async def test_without_notifications_all_events_arrive_with_polls(
    here: LocalInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here.running.context.stream.relay, "notify", lambda *_: None)
    monkeypatch.setattr(here.running.context.stream.hub, "on_pending", lambda _: None)
    run_id = await here.trigger("nap", {"seconds": 0.3})
    assert states(await collect(here, run_id))[-1] == ("succeeded", 1)


async def test_followed_runs_are_read_again_after_the_link_was_lost(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.stream.hub.POLL_INTERVAL", 1e6)
    async with local_instance(address) as here:
        hub = here.running.context.stream.hub
        monkeypatch.setattr(here.running.context.stream.relay, "notify", lambda *_: None)
        monkeypatch.setattr(hub, "on_pending", lambda _: None)
        new_pages, was_read = hub.reader.new_pages, asyncio.Event()

        async def read(afters: Mapping[int, int]) -> dict[int, EventPage]:
            pages = await new_pages(afters)
            if 2 in afters.values():
                was_read.set()
            return pages

        monkeypatch.setattr(hub.reader, "new_pages", read)
        run_id = await here.trigger("nap", {"seconds": 600})
        await here.attempt(run_id)
        events: list[StoredEvent] = []
        reading = asyncio.create_task(collect(here, run_id, events=events))
        await soon(lambda: has_received(events, 2))
        # A new follower makes the hub read again, after both events. That read could still find the cancellation.
        await was_read.wait()
        await cancel(here, run_id)
        await here.ended(run_id)
        assert not reading.done()
        assert await here.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name LIKE 'flotilla/%/link/%' AND datname = current_database()"
        )
        assert states(await reading)[-1] == ("cancelled", 1)


async def has_received(events: list[StoredEvent], count: int) -> bool:
    return len(events) >= count


async def test_an_action_that_waits_for_the_result_of_a_run_receives_it(here: LocalInstance) -> None:
    run = await here.run("ask-another", {"of": "echo"})
    assert run.result == {"said": {"x": 1}}
    run = await here.run("ask-another", {"of": "give-up"})
    assert run.result is not None
    assert re.fullmatch(r"RunFailed: run \d+ failed: .*there is no such parcel", run.result["failed"])
    # A run that does not end meanwhile, however late the answers are.
    run = await here.run("ask-another", {"of": "nap", "given": {"seconds": 600}, "timeout": 0.05})
    assert run.result == {"failed": "TimeoutError: "}


@pytest.mark.parametrize(
    ("path", "last", "slug"),
    [
        ("/runs/987654/events", None, "not-found"),
        ("/runs/seventeen/events", None, "bad-request"),
        ("/runs/{id}/events", "seven", "bad-request"),
        ("/runs/{id}/events", "-1", "bad-request"),
        ("/runs/{id}/events", "999", "bad-request"),
    ],
)
async def test_an_invalid_request_for_a_stream_is_refused_before_the_stream_begins(
    here: LocalInstance, path: str, last: str | None, slug: str
) -> None:
    run = await here.run("noop")
    headers = {} if last is None else {"Last-Event-ID": last}
    is_problem(await here.running.client.get(path.format(id=run.id), headers=headers), slug)


async def test_the_number_of_open_streams_of_an_instance_is_limited(address: str) -> None:
    async with local_instance(address, streams=3) as here:
        run_id = await here.trigger("nap", {"seconds": 600})
        url = f"/runs/{run_id}/events"
        streams = [asyncio.create_task(here.running.client.get(url)) for _ in range(3)]
        await soon(lambda: here.sql("SELECT 1 WHERE %s", here.running.context.open_streams.total() == 3))
        refused = await here.running.client.get(url)
        is_problem(refused, "unavailable")
        assert int(refused.headers["retry-after"]) > 0
        await cancel(here, run_id)
        assert [answer.status_code for answer in await asyncio.gather(*streams)] == [200] * 3
        assert (await here.running.client.get(url)).status_code == 200
        assert here.running.context.open_streams.total() == 0


async def test_the_number_of_open_streams_of_an_api_key_is_limited(address: str) -> None:
    (one, first_line), (other, second_line) = make_key("one", "read"), make_key("other", "read")
    async with local_instance(address, streams_per_key=2, api_keys=f"{first_line},{second_line}") as here:
        run_id = await here.trigger("nap", {"seconds": 600})
        client, url, context = here.running.client, f"/runs/{run_id}/events", here.running.context
        streams = [asyncio.create_task(client.get(url, headers={"x-api-key": one})) for _ in range(2)]
        await soon(lambda: here.sql("SELECT 1 WHERE %s", context.open_streams.total() == 2))
        refused = await asyncio.wait_for(client.get(url, headers={"x-api-key": one}), 60)
        is_problem(refused, "unavailable")
        assert "this caller has 2 streams open here" in refused.text
        assert refused.headers["retry-after"] == "5"
        streams.append(asyncio.create_task(client.get(url, headers={"x-api-key": other})))
        await soon(lambda: here.sql("SELECT 1 WHERE %s", context.open_streams.total() == 3))
        await cancel(here, run_id)
        assert [answer.status_code for answer in await asyncio.gather(*streams)] == [200] * 3
        assert not context.open_streams


async def cancel(here: LocalInstance, run_id: int) -> None:
    database = here.running.context.database
    async with database.connection() as connection:
        await cancel_run(connection, database.namespace, run_id)


async def test_an_invalid_event_is_refused_and_the_run_continues(here: LocalInstance) -> None:
    run = await here.run("emit-badly")
    assert run.state == "succeeded"
    assert len(run.result) == 6
    assert [event.kind for event in await read_events(here, run.id)] == ["state", "state", "still-here", "state"]


async def test_a_follower_that_is_cancelled_during_a_read_loses_no_connection(
    here: LocalInstance, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, database = here.running.context.stream.hub, here.running.context.database
    pids: list[int] = []

    async def reads() -> bool:
        waiting = (
            "SELECT pid FROM pg_stat_activity "
            "WHERE query = 'SELECT pg_advisory_lock_shared(17)' AND wait_event_type = 'Lock'"
        )
        return await here.sql(waiting) == [(pid,) for pid in pids] != []

    async def pages(_: object) -> dict[int, EventPage]:
        async with database.autocommit() as connection:
            pids.append(connection.info.backend_pid)
            await connection.execute("SELECT pg_advisory_lock_shared(17)")
        return {}

    monkeypatch.setattr(hub.reader, "event_pages", pages)
    page = hub.reader.older_events(17)
    # The read lasts until this session ends.
    async with await psycopg.AsyncConnection.connect(address, autocommit=True) as gate:
        await gate.execute("SELECT pg_advisory_lock(17)")
        reading = asyncio.ensure_future(page(0))
        await soon(reads)
        # The framework cancels the stream of a client that has left in the same way: in each iteration of the loop.
        while not reading.done():
            reading.cancel()
            await asyncio.sleep(0)
        assert reading.cancelled()
    # The read in progress ends by itself, and the next read follows it.
    assert await asyncio.wait_for(page(0), 60) == []
    assert pids[0] in {pid for (pid,) in await here.sql("SELECT pid FROM pg_stat_activity")}
    assert [record for record in caplog.records if record.name.startswith("psycopg")] == []
