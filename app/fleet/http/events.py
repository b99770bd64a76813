"""Events as streams: what becomes of a run, and every change of state in the cluster.

    id: 3
    event: progress
    data: {"run":17,"seq":3,"kind":"progress","data":{"done":0.5,"text":null},"at":"…"}

A run's stream begins with its first event, or after `Last-Event-ID` (or `?after=`, for a browser's EventSource, which
sends the header only when it reconnects by itself). It goes on live and ends with `done`. The id is the event's number,
so any instance can go on where another stopped. `done` has no id: it is not an event of the run, and a client that
reconnects after it receives it again.

The feed begins now, or after `Last-Event-ID`. Its ids number all changes of the cluster. A client that wants only some
of them receives the id of what was left out with every heartbeat, so that it need not read all of it again when it
reconnects. A client that reconnects too late receives `missed`.

A stream ends early in these cases, each time with a `retry:` that spreads clients out; they reconnect to any instance
and miss nothing: the instance drains (the edge ends it), the stream is old (`STREAM_AGE`), the client takes less than
what comes. The connection of a client that reads nothing at all is cut (by the edge, too).

An event is encoded once for all clients, by the first that needs it, and sent in pieces of about `PIECE` bytes. A
client waits for its turn before each piece (`Pacer`), so that the event loop serves other requests between a few of
them. Before a stream opens, it has waited for a turn too (at the edge), behind connections that are still to be
accepted. What a client has not read is in the connection's buffers and the piece being sent, and nowhere else in
memory.

The number of streams is limited, for an instance and for a key: each is a connection that stays.
"""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Annotated, Any

import pydantic_core
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.responses import StreamingResponse

from app.fleet.engine.actions import admin
from app.fleet.http.edge.auth import key_of, needs
from app.fleet.http.edge.context import Context, InContext
from app.fleet.http.edge.middleware import RETRY_MS
from app.fleet.http.edge.openapi import problem_responses
from app.fleet.http.edge.problems import HttpError, Unavailable
from app.fleet.http.runs import RunId, number_of, states_of
from app.fleet.runs.events import DONE, STATE, StoredEvent
from app.fleet.runs.feed import Batch
from app.fleet.stream.channel import Follower
from app.fleet.stream.hub import Hub
from app.fleet.stream.pacer import Pacer

router = APIRouter(tags=["events"], dependencies=[Depends(needs())])

COME_BACK = 5
# No two streams end of old age in the same moment.
AGES = (0.8, 1.2)
# A stream in which nothing happens says so, to everything between it and its client.
HEARTBEAT = 15.0
MISSED = "missed"
PIECE = 32_768

STREAM: dict[str, Any] = {
    "response_class": StreamingResponse,
    "responses": {
        200: {"description": "Server-Sent Events", "content": {EventSourceResponse.media_type: {}}},
        **problem_responses(400, 404),
    },
}
ID = "The id of the last event seen"


async def last_seen(
    last: Annotated[str | None, Header(alias="Last-Event-ID", description=ID)] = None,
    after: Annotated[str | None, Query(description=f"{ID}, for who cannot send the header, which goes first")] = None,
) -> str | None:
    return last or after


LastSeen = Annotated[str | None, Depends(last_seen)]


async def place(request: Request, context: InContext) -> AsyncIterator[None]:
    """Take one of the places for streams, or refuse."""
    settings, taken, key = context.settings, context.open_streams, key_of(request)
    # Other requests need connections too.
    most = min(settings.streams, context.connections.limit * 3 // 4)
    if taken.total() >= most:
        raise full(f"this instance has {most} streams open, which is as many as it may have")
    if key is not None and taken[key] >= settings.streams_per_key:
        raise full(f"this API key has {settings.streams_per_key} streams open here, which is as many as it may have")
    taken[key] += 1
    try:
        yield
    finally:
        taken[key] -= 1
        if not taken[key]:
            del taken[key]


class EventStream(EventSourceResponse):
    """The framework's, written to directly: a generator of the framework's own costs two tasks more for each client."""

    def __init__(self, pieces: AsyncIterator[bytes], pacer: Pacer) -> None:
        super().__init__(in_turn(pieces, pacer), headers={"x-accel-buffering": "no"})


async def in_turn(pieces: AsyncIterator[bytes], pacer: Pacer) -> AsyncIterator[bytes]:
    """Wait for this client's turn after each piece."""
    async for piece in pieces:
        yield piece
        await pacer.wait()


class Age:
    """How long a stream may still go on."""

    def __init__(self, context: Context) -> None:
        self.now = asyncio.get_running_loop().time
        self._until = self.now() + context.settings.stream_age * random.uniform(*AGES)

    @property
    def is_over(self) -> bool:
        return self.now() >= self._until

    @property
    def patience(self) -> float:
        """How long to wait before there is something to say, if it is only that nothing happens."""
        return max(0.0, min(self._until - self.now(), HEARTBEAT))


# -- a run's ----------------------------------------------------------------------------------------------------------


async def run_follower(run_id: RunId, context: InContext, seen: LastSeen) -> AsyncIterator[Follower[StoredEvent]]:
    async with context.stream.hub.follow(number_of(run_id), after_of(seen, digits=9) or 0) as follower:
        yield follower


@router.get("/runs/{id}/events", dependencies=[Depends(place)], **STREAM)
async def follow_run(
    follower: Annotated[Follower[StoredEvent], Depends(run_follower)], context: InContext, run_id: RunId
) -> EventStream:
    """Follow a run: everything that became of it, then whatever becomes of it, until it ends."""
    return EventStream(told(follower, number_of(run_id), Age(context)), context.stream.hub.pacer)


async def told(follower: Follower[StoredEvent], run_id: int, age: Age) -> AsyncIterator[bytes]:
    while not follower.ended:
        events = await follower.more(age.patience)
        if events:
            for piece in in_pieces(encoded_event(event, run_id) for event in events):
                yield piece
        elif not follower.ended:
            yield KEEPALIVE_COMMENT
        if follower.fell_behind:
            yield come_back("you took less than what came")
            return
        if age.is_over and not follower.ended:
            yield come_back("this stream is old")
            return
    if follower.pruned:
        yield come_back("the run was forgotten")
    else:
        yield in_words(None, DONE, as_json({"run": run_id}))


def encoded_event(event: StoredEvent, run_id: int) -> bytes:
    if event.encoded is None:
        event.encoded = in_words(event.seq, event.kind, event.as_json(run_id))
    return event.encoded


# -- everybody's ------------------------------------------------------------------------------------------------------


async def wanted_actions(
    context: InContext,
    action: Annotated[list[str] | None, Query(description="Of these actions only; may be repeated")] = None,
) -> set[int]:
    wanted = set()
    for name in action or ():
        if (identifier := await context.stream.hub.action_id(name)) is None:
            raise admin.unknown(name)
        wanted.add(identifier)
    return wanted


async def wanted_states(
    state: Annotated[list[str] | None, Query(description="One or more, repeated or with commas between")] = None,
) -> set[str]:
    return set(states_of(state or ()))


async def feed_follower(context: InContext, seen: LastSeen) -> AsyncIterator[Follower[Batch]]:
    async with context.stream.hub.follow_feed(after_of(seen, digits=18)) as follower:
        yield follower


@router.get("/events", dependencies=[Depends(place)], **STREAM)
async def follow_feed(
    actions: Annotated[set[int], Depends(wanted_actions)],
    states: Annotated[set[str], Depends(wanted_states)],
    follower: Annotated[Follower[Batch], Depends(feed_follower)],
    context: InContext,
) -> EventStream:
    """Follow the cluster: every change of state of every run, from now on."""
    hub = context.stream.hub
    return EventStream(told_of_all(follower, Wanted(actions, states, hub), Age(context)), hub.pacer)


class Wanted:
    """Which changes of the feed a client wants."""

    def __init__(self, actions: set[int], states: set[str], hub: Hub) -> None:
        self._actions = actions
        self._states = states
        self._hub = hub

    def of(self, batch: Batch, after: int) -> Sequence[bytes]:
        """Return the changes of a batch above that number that the client wants, as they are sent."""
        if self._states and batch.state not in self._states:
            return ()
        if batch.encoded is None:
            batch.encoded = [in_words(each.number, STATE, each.as_json(self._hub.names)) for each in batch.after(-1)]
        begin = max(0, after + 1 - batch.first)
        if not self._actions:
            return batch.encoded[begin:] if begin else batch.encoded
        pairs = zip(batch.encoded[begin:], batch.actions[begin:], strict=True)
        return [change for change, action_id in pairs if action_id in self._actions]


async def told_of_all(follower: Follower[Batch], wanted: Wanted, age: Age) -> AsyncIterator[bytes]:
    # A client that has only just come has a number to come back with.
    yield up_to(follower.seq)
    spoke = age.now()
    over = False
    while not over:
        # Asked before, so that even the oldest stream has said what was there when it began.
        over = age.is_over
        seen = follower.seq
        for piece in in_pieces(changes(await follower.more(age.patience), wanted, seen)):
            yield piece
            spoke = age.now()
        if follower.fell_behind:
            yield come_back("you took less than what came")
            return
        if age.now() - spoke >= HEARTBEAT:
            yield up_to(follower.seq)
            spoke = age.now()
    yield come_back("this stream is old")


def changes(batches: Iterable[Batch], wanted: Wanted, seen: int) -> Iterator[bytes]:
    """Yield what these batches have for a client that has seen everything up to that number."""
    for batch in batches:
        if (until := batch.missing(seen)) > seen:
            yield in_words(until, MISSED, as_json({"after": seen, "until": until}))
        yield from wanted.of(batch, seen)
        seen = batch.seq


# -- the wire ---------------------------------------------------------------------------------------------------------


def in_words(number: int | None, kind: str, data: str) -> bytes:
    return format_sse_event(data_str=data, event=kind, id=None if number is None else str(number))


def in_pieces(words: Iterable[bytes]) -> Iterator[bytes]:
    """Join what is small, and never so much that what a client does not read takes much memory."""
    piece: list[bytes] = []
    size = 0
    for word in words:
        piece.append(word)
        size += len(word)
        if size >= PIECE:
            yield b"".join(piece)
            piece, size = [], 0
    if piece:
        yield b"".join(piece)


def up_to(number: int) -> bytes:
    """Nothing, and the number to come back with."""
    return format_sse_event(id=str(number), comment="up to here")


def come_back(why: str) -> bytes:
    return format_sse_event(comment=f"{why}: come back", retry=random.randint(*RETRY_MS))


def as_json(value: object) -> str:
    return pydantic_core.to_json(value).decode()


def after_of(seen: str | None, digits: int) -> int | None:
    if not seen:
        return None
    if not re.fullmatch(rf"[0-9]{{1,{digits}}}", seen):
        raise HttpError("`Last-Event-ID`, or `after`, is the id of the last event you have seen, a whole number")
    return int(seen)


def full(why: str) -> Unavailable:
    return Unavailable(f"{why}: try again shortly, or at another instance", retry_after=COME_BACK)
