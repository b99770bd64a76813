"""Server-Sent Events: the events of one run, and the feed of all state changes in the cluster.

    id: 3
    event: progress
    data: {"run":17,"seq":3,"kind":"progress","data":{"done":0.5,"text":null},"at":"…"}

The stream of a run begins with its first event, or after `Last-Event-ID`. (A browser's EventSource sends this header
only when it reconnects by itself; `?after=` has the same meaning.) It continues with new events and ends with `done`.
The id is the number of the event, so any instance can continue a stream. `done` has no id: it is not an event of the
run, and a client that reconnects after `done` receives it again.

The feed begins now, or after `Last-Event-ID`. Its ids number all changes in the cluster. A client that wants only some
of the changes receives the current id with every heartbeat, so that it need not skip the same changes again when it
reconnects. A client that reconnects too late receives `missed`.

A stream ends early in three cases: the instance drains (the edge ends the stream), the stream is older than
`STREAM_AGE`, or the client reads more slowly than events arrive. Each time it ends with a `retry:` with jitter; the
client reconnects to any instance and misses nothing. The edge also closes the connection of a client that reads nothing
at all.

An event is encoded once for all clients, by the first stream that needs it, and sent in chunks of about `CHUNK_BYTES`.
A stream waits for its turn after each chunk (`Pacer`), so that the event loop serves other requests in between. A new
stream also waits for its turn before it opens (at the edge), behind connections that are not yet accepted. What a
client has not read is in the buffers of its connection and in the chunk that is being sent, and nowhere else in memory.

The number of streams is limited for each instance and for each API key, because each stream keeps a connection open.
"""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Annotated

import pydantic_core
from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.responses import StreamingResponse

from app.fleet.edge.auth import needs, stream_slot
from app.fleet.edge.context import Context, InContext
from app.fleet.edge.middleware import RETRY_MS
from app.fleet.edge.openapi import event_stream, problem_responses
from app.fleet.edge.problems import HttpError
from app.fleet.engine.actions import admin
from app.fleet.http.runs import RunId, States, states_of
from app.fleet.runs.effects.events import DONE, STATE, StoredEvent
from app.fleet.runs.effects.feed import Batch
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read.event_types import EmittedEvent, FeedEvent, FeedMissed, RunDone, RunEvent
from app.fleet.stream.channel import Follower
from app.fleet.stream.pacer import Pacer
from app.fleet.stream.reader import Reader

router = APIRouter(tags=["events"], dependencies=[Depends(needs())])

# Factors of STREAM_AGE: streams that began together do not end together.
AGE_JITTER = (0.8, 1.2)
# An idle stream sends a heartbeat after this time, so that no proxy between it and its client closes it.
HEARTBEAT = 15.0
MISSED = "missed"
CHUNK_BYTES = 32_768
ID = "The id of the last event that was received"


async def last_seen(
    last: Annotated[str | None, Header(alias="Last-Event-ID", description=ID)] = None,
    after: Annotated[
        str | None, Query(description=f"{ID}, for clients that cannot send the header. The header takes precedence")
    ] = None,
) -> str | None:
    return last or after


LastSeen = Annotated[str | None, Depends(last_seen)]


class EventStream(EventSourceResponse):
    """FastAPI's response, with encoded chunks: its own generators would cost two more tasks for each client."""

    def __init__(self, chunks: AsyncIterator[bytes], pacer: Pacer) -> None:
        super().__init__(paced(chunks, pacer), headers={"x-accel-buffering": "no"})


async def paced(chunks: AsyncIterator[bytes], pacer: Pacer) -> AsyncIterator[bytes]:
    """Wait for this stream's turn after each chunk."""
    async for chunk in chunks:
        yield chunk
        await pacer.wait()


class Age:
    """The age of a stream, and the time until its next heartbeat or its end."""

    def __init__(self, context: Context) -> None:
        self.now = asyncio.get_running_loop().time
        self._until = self.now() + context.settings.stream_age * random.uniform(*AGE_JITTER)

    @property
    def is_over(self) -> bool:
        return self.now() >= self._until

    @property
    def timeout(self) -> float:
        """The seconds to wait for an event until the next heartbeat or the end of the stream."""
        return max(0.0, min(self._until - self.now(), HEARTBEAT))


# -- the events of a run ----------------------------------------------------------------------------------------------


async def run_follower(run_id: RunId, context: InContext, seen: LastSeen) -> AsyncIterator[Follower[StoredEvent]]:
    async with context.stream.hub.follow(run_id, after_of(seen, digits=9) or 0) as follower:
        yield follower


@router.get(
    "/runs/{id}/events",
    dependencies=[Depends(stream_slot)],
    response_class=StreamingResponse,
    responses={200: event_stream(RunEvent | EmittedEvent | RunDone), **problem_responses(400, 404)},
)
async def follow_run(
    follower: Annotated[Follower[StoredEvent], Depends(run_follower)], context: InContext, run_id: RunId
) -> EventStream:
    """Follow a run: its events so far, then each new one, until the run has ended."""
    return EventStream(run_chunks(follower, run_id, Age(context)), context.stream.hub.pacer)


async def run_chunks(follower: Follower[StoredEvent], run_id: int, age: Age) -> AsyncIterator[bytes]:
    while not follower.ended:
        events = await follower.more(age.timeout)
        if events:
            for chunk in in_chunks(encoded_event(event, run_id) for event in events):
                yield chunk
        elif not follower.ended:
            yield KEEPALIVE_COMMENT
        if follower.fell_behind:
            yield reconnect("this client reads too slowly")
            return
        if age.is_over and not follower.ended:
            yield reconnect("this stream has reached its maximum age")
            return
    if follower.pruned:
        yield reconnect("the run was deleted")
    else:
        yield encoded(None, DONE, as_json(RunDone(run=run_id)))


def encoded_event(event: StoredEvent, run_id: int) -> bytes:
    if event.encoded is None:
        event.encoded = encoded(event.seq, event.kind, event.as_json(run_id))
    return event.encoded


# -- the feed ---------------------------------------------------------------------------------------------------------


async def selected_actions(
    context: InContext,
    action: Annotated[list[str] | None, Query(description="Only changes of this action; may be repeated")] = None,
) -> set[int]:
    selected = set()
    for name in action or ():
        if (identifier := await context.stream.hub.reader.action_id(name)) is None:
            raise admin.unknown(name)
        selected.add(identifier)
    return selected


async def selected_states(state: States = None) -> set[RunState]:
    return set(states_of(state or ()))


async def feed_follower(context: InContext, seen: LastSeen) -> AsyncIterator[Follower[Batch]]:
    async with context.stream.hub.follow_feed(after_of(seen, digits=18)) as follower:
        yield follower


@router.get(
    "/events",
    dependencies=[Depends(stream_slot)],
    response_class=StreamingResponse,
    responses={200: event_stream(FeedEvent | FeedMissed), **problem_responses(400, 404)},
)
async def follow_feed(
    actions: Annotated[set[int], Depends(selected_actions)],
    states: Annotated[set[RunState], Depends(selected_states)],
    follower: Annotated[Follower[Batch], Depends(feed_follower)],
    context: InContext,
) -> EventStream:
    """Follow the feed: every change of state of every run, from now on."""
    hub = context.stream.hub
    return EventStream(feed_chunks(follower, Filter(actions, states, hub.reader), Age(context)), hub.pacer)


class Filter:
    """Selects the changes of the feed that a client wants."""

    def __init__(self, actions: set[int], states: set[RunState], reader: Reader) -> None:
        self._actions = actions
        self._states = states
        self._reader = reader

    def of(self, batch: Batch, after: int) -> Sequence[bytes]:
        """Return the selected changes of a batch with a number above `after`, encoded."""
        if self._states and batch.state not in self._states:
            return ()
        if batch.encoded is None:
            batch.encoded = [encoded(each.number, STATE, each.as_json(self._reader.names)) for each in batch.after(-1)]
        begin = max(0, after + 1 - batch.first)
        if not self._actions:
            return batch.encoded[begin:] if begin else batch.encoded
        pairs = zip(batch.encoded[begin:], batch.actions[begin:], strict=True)
        return [change for change, action_id in pairs if action_id in self._actions]


async def feed_chunks(follower: Follower[Batch], selected: Filter, age: Age) -> AsyncIterator[bytes]:
    # A client that has received no change yet needs an id to reconnect with.
    yield up_to(follower.seq)
    sent_at = age.now()
    over = False
    while not over:
        # Read first, so that even a stream that is too old sends the changes that existed when it began.
        over = age.is_over
        seen = follower.seq
        for chunk in in_chunks(changes(await follower.more(age.timeout), selected, seen)):
            yield chunk
            sent_at = age.now()
        if follower.fell_behind:
            yield reconnect("this client reads too slowly")
            return
        if age.now() - sent_at >= HEARTBEAT:
            yield up_to(follower.seq)
            sent_at = age.now()
    yield reconnect("this stream has reached its maximum age")


def changes(batches: Iterable[Batch], selected: Filter, seen: int) -> Iterator[bytes]:
    """Yield the selected changes for a client that has received everything up to the number `seen`."""
    for batch in batches:
        if (until := batch.missing(seen)) > seen:
            yield encoded(until, MISSED, as_json(FeedMissed(after=seen, until=until)))
        yield from selected.of(batch, seen)
        seen = batch.seq


# -- the format -------------------------------------------------------------------------------------------------------


def encoded(number: int | None, kind: str, data: str) -> bytes:
    return format_sse_event(data_str=data, event=kind, id=None if number is None else str(number))


def in_chunks(events: Iterable[bytes]) -> Iterator[bytes]:
    """Join events to chunks: few writes, and little memory for a client that does not read."""
    chunk: list[bytes] = []
    size = 0
    for event in events:
        chunk.append(event)
        size += len(event)
        if size >= CHUNK_BYTES:
            yield b"".join(chunk)
            chunk, size = [], 0
    if chunk:
        yield b"".join(chunk)


def up_to(number: int) -> bytes:
    """Return an empty event: only the id with which to reconnect."""
    return format_sse_event(id=str(number), comment="up to here")


def reconnect(reason: str) -> bytes:
    return format_sse_event(comment=f"{reason}: reconnect", retry=random.randint(*RETRY_MS))


def as_json(value: object) -> str:
    return pydantic_core.to_json(value).decode()


def after_of(seen: str | None, digits: int) -> int | None:
    if not seen:
        return None
    if not re.fullmatch(rf"[0-9]{{1,{digits}}}", seen):
        raise HttpError(
            "`Last-Event-ID` (or `after`) must be the id of the last event that was received, a whole number"
        )
    return int(seen)
