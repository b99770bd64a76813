"""The hub: the one reader of an instance for everything that is followed there, wherever the runs run.

Each run that is followed has a channel (`channel.py`), and so has the feed. The reader reads what is new of all
channels that may have something new, in one statement for up to `AT_ONCE` runs and one for the feed, and every follower
is served from the channels. A thousand followers of a run cost the database what one does.

    what wakes the reader                        when
    `said:`, `changed:`, from a relay            at once; reads are at least `SPACING` apart
    `runs:`, which says that runs wait           at once, for runs of those actions
    the poll                                     every `POLL`, for all that is followed: a notification may be lost
    the link is back, or a follower begins       at once

Followers that begin share reads too (`Joint`): those that come while a read is under way wait for the next one
together. So the hub borrows at most two connections of the pool at once, one to read what is new and to begin, and one
for followers that read older events, and never holds one while it waits for a lock.

Memory: a channel is bounded by itself, and the channels of all runs together by `KEPT_TOGETHER`. Beyond that, the
channel that got nothing new for longest keeps nothing, and a follower that is behind in it reads from the database.

Nothing that is followed depends on a notification, on the instance that runs the run, or on this instance: a client
that loses it goes on elsewhere, from the number it has.
"""

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import psycopg

from app.fleet.background import Service, cancel_and_wait, wait_for_event
from app.fleet.db.pool import Connection, Database, DatabaseAway
from app.fleet.errors import DatabaseError, EventUnknown, FeedOff, RunUnknown
from app.fleet.runs import feed
from app.fleet.runs.events import MOST, EventPage, StoredEvent, read_all
from app.fleet.runs.feed import Batch, Given
from app.fleet.stream.channel import Channel, Following, Numbered, Page, Turns
from app.fleet.stream.relay import STILL, Relay
from app.fleet.telemetry.logs import events

SPACING = 0.01
POLL = 1.0
RETRY = 0.25
AFTER_DEFECT = 1.0
# How many runs are read in one statement.
AT_ONCE = 50
# How many transactions that number the feed follow each other before something else is read.
STEPS = 20
# How often numbering is tried when the same number was given twice.
TRIES = 3
# How long a follower waits to begin.
OPENING = 10.0
# What the channels of all runs may keep together, and what the feed's may, in bytes.
KEPT_TOGETHER = 67_108_864
FEED_KEPT = 8_388_608

log = events(__name__)


Item = TypeVar("Item", bound=Numbered)
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Joint(Generic[Asked, Answer]):
    """Reads for many callers at once: one read at a time, for up to so many of those that wait when it begins.

    `read` returns the answers that there are; an error that it raises is the answer to all of its callers. It runs in a
    task of its own, which goes on when a caller is cancelled: the framework cancels a stream whose client left again
    and again until it has ended, and psycopg, which needs a moment to cancel a statement, would lose the connection.
    """

    def __init__(self, read: Callable[[Collection[Asked]], Awaitable[Mapping[Asked, Answer]]], at_once: int) -> None:
        self._read = read
        self._at_once = at_once
        self._waiting: dict[Asked, list[asyncio.Future[Answer | None]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def ask(self, asked: Asked) -> Answer | None:
        """Return the answer to this, of a read that begins from now on; None if there is none."""
        answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(asked, []).append(answer)
        if self._task is None:
            # In no request's context, because the task outlives the request that needs it first.
            self._task = asyncio.create_task(self._read_all(), name="hub-joint", context=contextvars.Context())
        try:
            async with asyncio.timeout(OPENING):
                return await answer
        except TimeoutError:
            raise DatabaseAway("the database takes too long to answer; try again shortly") from None

    async def stop(self) -> None:
        await cancel_and_wait(self._task)
        stopped = DatabaseAway("this instance is stopping; try again at another")
        self._refuse([each for waiting in self._waiting.values() for each in waiting], stopped)

    async def _read_all(self) -> None:
        try:
            while self._waiting:
                now = dict(list(self._waiting.items())[: self._at_once])
                self._waiting = {asked: each for asked, each in self._waiting.items() if asked not in now}
                try:
                    answers = await self._read(now)
                except Exception as error:  # noqa: BLE001 — each caller handles it as its own
                    self._refuse([each for waiting in now.values() for each in waiting], error)
                    continue
                except asyncio.CancelledError:
                    self._waiting |= now
                    raise
                for asked, waiting in now.items():
                    for each in waiting:
                        if not each.done():
                            each.set_result(answers.get(asked))
        finally:
            self._task = None

    def _refuse(self, waiting: Iterable["asyncio.Future[Answer | None]"], error: Exception) -> None:
        for each in waiting:
            if not each.done():
                each.set_exception(error)
                # Taken note of, in case its caller was cancelled just now.
                each.exception()


class RunChannel(Channel[StoredEvent]):
    def __init__(self, chapter: EventPage, after: int, turns: Turns) -> None:
        super().__init__(after, turns)
        self.action_id = chapter.action_id
        self.hear(chapter)

    def hear(self, chapter: EventPage) -> None:
        last = chapter.events[-1].seq if chapter.events else self.read
        self.take(chapter.events, complete=chapter.ended and last >= chapter.total)


class Hub(Service):
    name = "hub"

    def __init__(self, database: Database, relay: Relay) -> None:
        super().__init__()
        self.reads = 0
        self.turns = Turns()
        self._database = database
        self._relay = relay
        self._runs: dict[int, RunChannel] = {}
        self._feed: Channel[Batch] | None = None
        self._numbers = feed.Numbers()
        # Names of actions by their ids; complete for what the feed's channel keeps.
        self.names: dict[int, str] = {}
        self._ids: dict[str, int] = {}
        # What may have something new, in the order of the notifications; a set would let high ids wait for ever.
        self._dirty: dict[int, None] = {}
        self._feed_is_dirty = False
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        # What each channel of a run keeps, those that got something new last at the end.
        self._kept: dict[RunChannel, int] = {}
        self._kept_together = 0
        # A connection each, whatever the number of followers.
        self._reading, self._paging = asyncio.Semaphore(1), asyncio.Semaphore(1)
        self._beginning = Joint(self._begin_runs, AT_ONCE)
        self._beginning_feed = Joint(self._begin_feed, 1)
        self._naming = Joint(self._read_names, 1)
        self._catching_up = Joint(self._read_page, 1)
        self._catching_up_feed = Joint(self._read_feed_page, 1)

    @property
    def followed(self) -> int:
        """How many runs are followed here."""
        return len(self._runs)

    # -- for followers ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def follow(self, run_id: int, after: int = 0) -> AsyncIterator[Following[StoredEvent]]:
        """Follow a run from after that number on; refuse what cannot be followed."""
        channel = self._runs.get(run_id)
        # One that is complete may be so no longer: the run may have been retried.
        if channel is None or channel.complete or after > channel.read:
            begun = await self._beginning.ask((run_id, after))
            if begun is None:
                raise RunUnknown(f"there is no run {run_id}, or it ended so long ago that it was forgotten")
            total, begun_channel = begun
            if after > total:
                raise EventUnknown(f"run {run_id} has {total} events so far, and there is no {after} yet")
            channel = self._runs.get(run_id)
            if channel is None or channel.complete:
                channel = self._runs[run_id] = begun_channel
                if not channel.complete:
                    self._begun()
        channel.followers += 1
        self._keep(channel)
        self._look(run_id)
        try:
            yield Following(channel, after, self._patiently(lambda seq: self._catching_up.ask((run_id, seq))))
        finally:
            channel.followers -= 1
            if channel.followers == 0:
                self._kept_together -= self._kept.pop(channel, 0)
                if self._runs.get(run_id) is channel:
                    del self._runs[run_id]

    async def count(self, run_id: int) -> int:
        """Return how many events a run has by now."""
        async with self._paging:
            chapter = (await self._chapters({run_id: 0}, most=1)).get(run_id)
        if chapter is None:
            raise RunUnknown(f"there is no run {run_id}, or it ended so long ago that it was forgotten")
        return chapter.total

    @asynccontextmanager
    async def follow_feed(self, after: int | None = None) -> AsyncIterator[Following[Batch]]:
        """Follow the feed from after that number on, or from now on."""
        given = await self._beginning_feed.ask(None)
        assert given is not None
        if not given.kept:
            raise FeedOff("the feed is switched off: FLOTILLA_FEED_RETENTION is 0")
        now = given.number
        if after is not None and after > now:
            raise EventUnknown(f"the feed has come to {now}, and there is no {after} yet")
        if self._feed is None:
            self._feed = Channel(now, self.turns, FEED_KEPT)
            self._begun()
        channel = self._feed
        channel.followers += 1
        self._look_at_feed()
        try:
            yield Following(channel, now if after is None else after, self._patiently(self._catching_up_feed.ask))
        finally:
            channel.followers -= 1
            if channel.followers == 0:
                self._feed = None

    async def id_of(self, action: str) -> int | None:
        """Return the id of an action of any release; None if there is none of this name."""
        if action not in self._ids:
            await self._naming.ask(None)
        return self._ids.get(action)

    def _begun(self) -> None:
        if not self._relay.wanted:
            self._relay.tell_of_followers()

    def _patiently(self, page: Callable[[int], Awaitable[Sequence[Item] | None]]) -> Page[Item]:
        """Have a follower that reads from the database wait while it is away, and not fail."""

        async def read(after: int) -> Sequence[Item] | None:
            try:
                return await page(after) or []
            except (psycopg.Error, DatabaseError) as error:
                log.debug("hub.failed", reason=" ".join(str(error).split()))
                await asyncio.sleep(RETRY)
                return None

        return read

    # -- reads --------------------------------------------------------------------------------------------------------

    async def _begin_runs(self, asked: Collection[tuple[int, int]]) -> dict[tuple[int, int], tuple[int, RunChannel]]:
        """Read the first page of each of these runs, from the lowest number on that any of the callers wants."""
        afters: dict[int, int] = {}
        for run_id, after in asked:
            afters[run_id] = min(after, afters.get(run_id, after))
        async with self._reading:
            chapters = await self._chapters(afters)
        channels = {
            run_id: (chapter.total, RunChannel(chapter, min(afters[run_id], chapter.total), self.turns))
            for run_id, chapter in chapters.items()
        }
        return {(run_id, after): channels[run_id] for run_id, after in asked if run_id in channels}

    async def _begin_feed(self, asked: Collection[None]) -> dict[None, Given]:
        """Number everything that is there by now, and return what the last number is."""
        earlier, tries = self._numbers.in_round, 0
        while True:
            try:
                async with self._reading, self._database.autocommit() as connection:
                    given = await self._give(connection)
            except psycopg.errors.UniqueViolation as error:
                # The lock did not keep another session from giving the same number. Its row is there at the next try.
                tries += 1
                if tries == TRIES:
                    raise
                log.debug("hub.failed", reason=" ".join(str(error).split()))
            else:
                if not given.kept or (given.complete and not earlier):
                    return dict.fromkeys(asked, given)
                earlier = earlier and not given.complete
            await asyncio.sleep(SPACING)

    async def _read_names(self, asked: Collection[None]) -> dict[None, None]:
        async with self._reading, self._database.autocommit() as connection:
            await self._learn(connection)
        return dict.fromkeys(asked)

    async def _read_page(self, asked: Collection[tuple[int, int]]) -> dict[tuple[int, int], Sequence[StoredEvent]]:
        found: dict[tuple[int, int], Sequence[StoredEvent]] = {}
        async with self._paging:
            for run_id, after in asked:
                if chapter := (await self._chapters({run_id: after})).get(run_id):
                    found[run_id, after] = chapter.events
        return found

    async def _chapters(self, wanted: Mapping[int, int], most: int = MOST) -> dict[int, EventPage]:
        self.reads += 1
        async with self._database.autocommit() as connection:
            return await read_all(connection, self._database.namespace, wanted, most)

    async def _read_feed_page(self, asked: Collection[int]) -> dict[int, Sequence[Batch]]:
        async with self._paging, self._database.autocommit() as connection:
            return {after: await self._feed_after(connection, after) for after in asked}

    async def _feed_after(self, connection: Connection, after: int) -> Sequence[Batch]:
        self.reads += 1
        batches = await feed.read(connection, self._database.namespace, after)
        if any(not self.names.keys() >= set(batch.actions) for batch in batches):
            await self._learn(connection)
        return batches

    async def _learn(self, connection: Connection) -> None:
        self.names = await feed.names(connection, self._database.namespace)
        self._ids = {name: identifier for identifier, name in self.names.items()}

    async def _give(self, connection: Connection) -> Given:
        """Number what has no number yet: all of it, or as much as is enough for now."""
        for _ in range(STEPS):
            self.reads += 1
            given = await self._numbers.give(connection, self._database.namespace)
            if given.complete or given.busy:
                break
        return given

    # -- notifications ------------------------------------------------------------------------------------------------

    def runs_said(self, named: str) -> None:
        """Handle `said:`; `named` is the ids of the runs that emitted something."""
        if named == "*":
            self._look_at_runs()
        elif self._runs:
            for run_id in map(int, named.split(",")):
                self._look(run_id)

    def runs_changed(self, named: str) -> None:
        """Handle `changed:`; `named` is the ids of the runs whose state changed."""
        self._look_at_feed()
        self.runs_said(named)

    def look_at_actions(self, action_ids: Iterable[int]) -> None:
        """Handle `runs:`: runs of these actions are pending, new ones or again."""
        self._look_at_feed()
        if self._runs:
            wanted = set(action_ids)
            for run_id, channel in self._runs.items():
                if channel.action_id in wanted:
                    self._look(run_id)

    def look_at_all(self) -> None:
        self._look_at_feed()
        self._look_at_runs()

    def _look_at_runs(self) -> None:
        self._dirty.update(dict.fromkeys(self._runs))
        self._wake.set()

    def _look(self, run_id: int) -> None:
        if run_id in self._runs:
            self._dirty[run_id] = None
            self._wake.set()

    def _look_at_feed(self) -> None:
        if self._feed is not None:
            self._feed_is_dirty = True
            self._wake.set()

    # -- the reader ---------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._read_for_ever(), name="hub"),
            asyncio.create_task(self._say_for_ever(), name="hub-interest"),
        ]

    async def _stop(self) -> None:
        for task in self._tasks:
            await cancel_and_wait(task)
        await self._beginning.stop()
        await self._beginning_feed.stop()
        await self._naming.stop()
        await self._catching_up.stop()
        await self._catching_up_feed.stop()

    async def _say_for_ever(self) -> None:
        while True:
            await asyncio.sleep(STILL)
            if self._runs or self._feed is not None:
                self._relay.tell_of_followers()

    async def _read_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._wake.clear()
            if loop.time() >= due:
                self.look_at_all()
                due = loop.time() + POLL * random.uniform(0.75, 1.25)
            if self._dirty or self._feed_is_dirty:
                try:
                    await self._read_runs()
                    await self._read_feed()
                except (psycopg.Error, DatabaseError) as error:
                    log.debug("hub.failed", reason=" ".join(str(error).split()))
                    await asyncio.sleep(RETRY)
                except Exception as error:  # noqa: BLE001 — a defect of ours must not end it for good
                    log.error("engine.defect", error=error, service="hub")
                    await asyncio.sleep(AFTER_DEFECT)
                await asyncio.sleep(SPACING)
            else:
                await wait_for_event(self._wake, max(0.0, due - loop.time()))

    async def _read_runs(self) -> None:
        dirty = [run_id for run_id in self._dirty if run_id in self._runs]
        wanted = {run_id: self._runs[run_id].read for run_id in dirty[:AT_ONCE]}
        self._dirty = dict.fromkeys(dirty[AT_ONCE:])
        if not wanted:
            return
        try:
            async with self._reading:
                chapters = await self._chapters(wanted)
        except BaseException:
            self._dirty.update(dict.fromkeys(wanted))
            raise
        for run_id, after in wanted.items():
            channel = self._runs.get(run_id)
            # Another channel, if every follower left and another one came meanwhile.
            if channel is None or channel.read != after:
                continue
            chapter = chapters.get(run_id)
            if chapter is None:
                channel.forget()
                continue
            channel.hear(chapter)
            self._keep(channel)
            if chapter.events and channel.read < chapter.total:
                self._look(run_id)

    async def _read_feed(self) -> None:
        channel = self._feed
        if channel is None or not self._feed_is_dirty:
            return
        after = channel.read
        # Before the read: what is notified of during the read may not be in it.
        self._feed_is_dirty = False
        try:
            async with self._reading, self._database.autocommit() as connection:
                given = await self._give(connection)
                batches = await self._feed_after(connection, after)
        except BaseException:
            self._feed_is_dirty = True
            raise
        if channel is self._feed:
            channel.take(batches)
            self._feed_is_dirty |= channel.read < given.number or not given.complete

    def _keep(self, channel: RunChannel) -> None:
        """Count what a channel keeps that got something new; beyond the bound, empty those that did not for longest."""
        self._kept_together += channel.weight - self._kept.pop(channel, 0)
        self._kept[channel] = channel.weight
        while self._kept_together > KEPT_TOGETHER:
            oldest = next(iter(self._kept))
            self._kept_together -= self._kept.pop(oldest)
            oldest.drop()
