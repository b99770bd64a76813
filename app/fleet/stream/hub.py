"""The hub: one reader for everyone here who follows, however many they are and wherever the runs run.

Each run that is followed here has a channel (`channel.py`), and so has the feed. The reader reads what is new of all
channels that may have something new, in one statement for all runs and one for the feed, and everyone is served from
the channels. A thousand followers of a run cost the database what one does.

    what tells the reader                        when
    `said:`, `changed:`, from a relay            at once; reads are at least `SPACING` apart
    `runs:`, which says that runs wait           at once, for runs of those actions
    the poll                                     every `POLL`, for all that is followed: a notification may be lost
    the link is back, or somebody begins         at once

Nothing that is followed depends on a notification, on who runs the run, or on this instance: who loses it goes on
elsewhere, from the number they have.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import psycopg

from app.fleet.db.pool import Connection, Database
from app.fleet.errors import DatabaseError, EventUnknown, FeedOff, RunUnknown
from app.fleet.service import Service, let_go, woken
from app.fleet.stream import feed
from app.fleet.stream.channel import Channel, Following, Numbered, Page
from app.fleet.stream.events import MOST, Chapter, Written, read_all
from app.fleet.stream.feed import Batch
from app.fleet.stream.relay import STILL, Relay
from app.fleet.telemetry.logs import events

SPACING = 0.01
POLL = 1.0
RETRY = 0.25
AFTER_DEFECT = 1.0
# How many runs are read in one statement.
AT_ONCE = 50

log = events(__name__)


Item = TypeVar("Item", bound=Numbered)


class RunChannel(Channel[Written]):
    def __init__(self, chapter: Chapter, after: int) -> None:
        super().__init__(after)
        self.action_id = chapter.action_id
        self.hear(chapter)

    def hear(self, chapter: Chapter) -> None:
        last = chapter.events[-1].seq if chapter.events else self.read
        self.take(chapter.events, complete=chapter.ended and last >= chapter.total)


class Hub(Service):
    name = "hub"

    def __init__(self, database: Database, relay: Relay) -> None:
        super().__init__()
        self.reads = 0
        self._database = database
        self._relay = relay
        self._runs: dict[int, RunChannel] = {}
        self._feed: Channel[Batch] | None = None
        self._numbers = feed.Numbers()
        # Of the actions that were met in the feed.
        self.names: dict[int, str] = {}
        # What may have something new, in the order in which that was heard; a set would let high ids wait for ever.
        self._dirty: dict[int, None] = {}
        self._feed_is_dirty = False
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def followed(self) -> int:
        """How many runs are followed here."""
        return len(self._runs)

    # -- for those who follow -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def follow(self, run_id: int, after: int = 0) -> AsyncIterator[Following[Written]]:
        """Follow a run from after that number on; refuse what cannot be followed."""
        channel = self._runs.get(run_id)
        # One that is complete may be so no longer: somebody had the run tried again.
        if channel is None or channel.complete or after > channel.read:
            chapter = await self._chapter(run_id, after)
            channel = self._runs.get(run_id)
            if channel is None or channel.complete:
                channel = self._runs[run_id] = RunChannel(chapter, after)
                if not channel.complete:
                    self._begun()
        channel.followers += 1
        self._look(run_id)
        try:
            yield Following(channel, after, self._patiently(lambda seq: self._page(run_id, seq)))
        finally:
            channel.followers -= 1
            if channel.followers == 0 and self._runs.get(run_id) is channel:
                del self._runs[run_id]

    async def count(self, run_id: int) -> int:
        """How many events a run has by now."""
        return (await self._chapter(run_id, 0, most=1)).total

    @asynccontextmanager
    async def follow_feed(self, after: int | None = None) -> AsyncIterator[Following[Batch]]:
        """Follow the feed from after that number on, or from now on."""
        async with self._database.connection() as connection:
            if not await feed.is_kept(connection, self._database.namespace):
                raise FeedOff("the feed is switched off: FLOTILLA_FEED_RETENTION is 0")
            now = await self._numbers.give(connection, self._database.namespace)
        if after is not None and after > now:
            raise EventUnknown(f"the feed has come to {now}, and there is no {after} yet")
        if self._feed is None:
            self._feed = Channel(now)
            self._begun()
        channel = self._feed
        channel.followers += 1
        try:
            yield Following(channel, now if after is None else after, self._patiently(self._feed_page))
        finally:
            channel.followers -= 1
            if channel.followers == 0:
                self._feed = None

    def _begun(self) -> None:
        if not self._relay.wanted:
            self._relay.tell_of_followers()

    def _patiently(self, page: Callable[[int], Awaitable[Sequence[Item]]]) -> Page[Item]:
        """Have somebody who reads from the database wait while it is away, and not fail."""

        async def read(after: int) -> Sequence[Item] | None:
            try:
                return await page(after)
            except (psycopg.Error, DatabaseError) as error:
                log.debug("hub.failed", reason=" ".join(str(error).split()))
                await asyncio.sleep(RETRY)
                return None

        return read

    async def _chapter(self, run_id: int, after: int, most: int = MOST) -> Chapter:
        """Return the first page of what came after that number, or say what is wrong with the question."""
        chapter = (await self._chapters({run_id: after}, most)).get(run_id)
        if chapter is None:
            raise RunUnknown(f"there is no run {run_id}, or it ended so long ago that it was forgotten")
        if after > chapter.total:
            raise EventUnknown(f"run {run_id} has {chapter.total} events so far, and there is no {after} yet")
        return chapter

    async def _page(self, run_id: int, after: int) -> Sequence[Written]:
        chapter = (await self._chapters({run_id: after})).get(run_id)
        return chapter.events if chapter else []

    async def _chapters(self, wanted: Mapping[int, int], most: int = MOST) -> dict[int, Chapter]:
        self.reads += 1
        async with self._database.autocommit() as connection:
            return await read_all(connection, self._database.namespace, wanted, most)

    async def _feed_page(self, after: int) -> Sequence[Batch]:
        self.reads += 1
        async with self._database.autocommit() as connection:
            batches = await feed.read(connection, self._database.namespace, after)
            await self._learn_names(connection, batches)
        return batches

    async def _learn_names(self, connection: Connection, batches: Sequence[Batch]) -> None:
        if any(not self.names.keys() >= set(batch.actions) for batch in batches):
            self.names = await feed.names(connection, self._database.namespace)

    # -- told by others -----------------------------------------------------------------------------------------------

    def runs_said(self, named: str) -> None:
        """Runs said something; `named` is their ids."""
        if named == "*":
            self._look_at_runs()
        elif self._runs:
            for run_id in map(int, named.split(",")):
                self._look(run_id)

    def runs_changed(self, named: str) -> None:
        self._look_at_feed()
        self.runs_said(named)

    def look_at_actions(self, action_ids: Iterable[int]) -> None:
        """Runs of these actions wait: new ones, or again."""
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
            await let_go(task)

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
                await woken(self._wake, max(0.0, due - loop.time()))

    async def _read_runs(self) -> None:
        dirty = [run_id for run_id in self._dirty if run_id in self._runs]
        wanted = {run_id: self._runs[run_id].read for run_id in dirty[:AT_ONCE]}
        self._dirty = dict.fromkeys(dirty[AT_ONCE:])
        if not wanted:
            return
        try:
            chapters = await self._chapters(wanted)
        except BaseException:
            self._dirty.update(dict.fromkeys(wanted))
            raise
        for run_id, after in wanted.items():
            channel = self._runs.get(run_id)
            # Another one, if everybody left and somebody came meanwhile.
            if channel is None or channel.read != after:
                continue
            chapter = chapters.get(run_id)
            if chapter is None:
                channel.forget()
                continue
            channel.hear(chapter)
            if chapter.events and channel.read < chapter.total:
                self._look(run_id)

    async def _read_feed(self) -> None:
        channel = self._feed
        if channel is None or not self._feed_is_dirty:
            return
        after = channel.read
        self.reads += 1
        async with self._database.connection() as connection:
            now = await self._numbers.give(connection, self._database.namespace)
            batches = await feed.read(connection, self._database.namespace, after)
            await self._learn_names(connection, batches)
        if channel is self._feed:
            channel.take(batches)
            self._feed_is_dirty = channel.read < now
