"""The hub: reads new events once for all followers of this instance, whichever instance executes the runs.

Each followed run has a channel (`channel.py`), and so has the feed. One task reads the new events of all channels that
may have some: one statement for up to `RUNS_AT_ONCE` runs, and one for the feed. Followers receive them from the
channels. So a thousand followers of a run cost the database as much as one.

    what causes a read                          when
    `emitted:`, `changed:`, from a relay        at once; reads are at least `READ_INTERVAL` apart
    `runs:`, which says that runs are pending   at once, for the followed runs of these actions
    the poll                                    every `POLL_INTERVAL`, for all channels: a notification may be lost
    the link is connected again                 at once, for all channels
    a new follower                              at once, for its channel

Followers that begin at the same time share reads (`shared_read.py`), and so do followers that read older events.

Memory: each channel is bounded, and the channels of all runs together keep at most `MAX_RUNS_WEIGHT`. Beyond that, the
channel that has had no new events for the longest time is emptied, and its followers read from the database.

Followers depend neither on notifications, nor on the instance that executes the run, nor on this instance: a client
that loses its connection continues at another instance, after the last number it has received.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from app.fleet.background import LoopErrors, Service, cancel_and_wait, jittered, wait_for_event
from app.fleet.db.pool.pool import Database
from app.fleet.errors import EventUnknown, FeedOff, RunUnknown
from app.fleet.runs.effects.events import StoredEvent
from app.fleet.runs.effects.feed import Batch
from app.fleet.stream.channel import Channel, Follower, RunChannel
from app.fleet.stream.pacer import Pacer
from app.fleet.stream.reader import RETRY_INTERVAL, RUNS_AT_ONCE, Reader
from app.fleet.stream.relay import FOLLOWING_INTERVAL, Relay
from app.fleet.telemetry.logs import event_log

READ_INTERVAL = 0.01
POLL_INTERVAL = 1.0
# About how many bytes the channels of all runs may keep together, and the feed's channel.
MAX_RUNS_WEIGHT = 67_108_864
MAX_FEED_WEIGHT = 8_388_608

log = event_log(__name__)


class Hub(Service):
    name = "hub"

    def __init__(self, database: Database, relay: Relay) -> None:
        super().__init__()
        self.pacer = Pacer()
        self.reader = Reader(database, self.pacer)
        self._relay = relay
        self._runs: dict[int, RunChannel] = {}
        self._feed: Channel[Batch] | None = None
        # Runs that may have new events, in the order of the notifications: in a set, high ids could wait for ever.
        self._unread: dict[int, None] = {}
        self._feed_is_unread = False
        self._wake = asyncio.Event()
        self._errors = LoopErrors(
            log, failed="hub.failed", defect="engine.defect", service="hub", retry_interval=RETRY_INTERVAL
        )
        self._tasks: list[asyncio.Task[None]] = []
        # The weight of each run's channel; the channel with the newest events is the last.
        self._weights: dict[RunChannel, int] = {}
        self._total_weight = 0

    @property
    def followed(self) -> int:
        """How many runs have followers at this instance."""
        return len(self._runs)

    # -- following ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def follow(self, run_id: int, after: int = 0) -> AsyncIterator[Follower[StoredEvent]]:
        """Follow a run, from the event after this number; raise `RunUnknown` or `EventUnknown`."""
        channel = self._runs.get(run_id)
        # A complete channel may be out of date: the run may have been retried.
        if channel is None or channel.complete or after > channel.read:
            first = await self.reader.first_pages.get((run_id, after))
            if first is None:
                raise run_unknown(run_id)
            total, new_channel = first
            if after > total:
                raise EventUnknown(f"run {run_id} has {total} events so far, and there is no {after} yet")
            channel = self._runs.get(run_id)
            if channel is None or channel.complete:
                channel = self._runs[run_id] = new_channel
                if not channel.complete:
                    self._notify_following()
        channel.followers += 1
        self._update_weight(channel)
        self._wake_for_run(run_id)
        try:
            yield Follower(channel, after, self.reader.older_events(run_id))
        finally:
            channel.followers -= 1
            if channel.followers == 0:
                self._total_weight -= self._weights.pop(channel, 0)
                if self._runs.get(run_id) is channel:
                    del self._runs[run_id]

    async def count(self, run_id: int) -> int:
        """Return how many events a run has."""
        count = await self.reader.count(run_id)
        if count is None:
            raise run_unknown(run_id)
        return count

    @asynccontextmanager
    async def follow_feed(self, after: int | None = None) -> AsyncIterator[Follower[Batch]]:
        """Follow the feed, from the change after this number, or from now on."""
        start = await self.reader.feed_starts.get(None)
        assert start is not None
        if not start.enabled:
            raise FeedOff("the feed is switched off: FLOTILLA_FEED_RETENTION is 0")
        last = start.last_number
        if after is not None and after > last:
            raise EventUnknown(f"the last number of the feed is {last}, and there is no {after} yet")
        if self._feed is None:
            self._feed = Channel(last, self.pacer, MAX_FEED_WEIGHT)
            self._notify_following()
        channel = self._feed
        channel.followers += 1
        self._wake_for_feed()
        try:
            yield Follower(channel, last if after is None else after, self.reader.older_batches())
        finally:
            channel.followers -= 1
            if channel.followers == 0:
                self._feed = None

    def _notify_following(self) -> None:
        if not self._relay.has_followers:
            self._relay.notify_following()

    # -- waking the reading task --------------------------------------------------------------------------------------

    def on_emitted(self, ids: str) -> None:
        """Handle `emitted:`, which names the runs that emitted events."""
        if ids == "*":
            self._wake_for_all_runs()
        elif self._runs:
            for run_id in map(int, ids.split(",")):
                self._wake_for_run(run_id)

    def on_changed(self, ids: str) -> None:
        """Handle `changed:`, which names the runs whose state changed."""
        self._wake_for_feed()
        self.on_emitted(ids)

    def on_pending(self, action_ids: Iterable[int]) -> None:
        """Handle `runs:`: runs of these actions became pending."""
        self._wake_for_feed()
        if self._runs:
            actions = set(action_ids)
            for run_id, channel in self._runs.items():
                if channel.action_id in actions:
                    self._wake_for_run(run_id)

    def wake_for_all(self) -> None:
        self._wake_for_feed()
        self._wake_for_all_runs()

    def _wake_for_all_runs(self) -> None:
        self._unread.update(dict.fromkeys(self._runs))
        self._wake.set()

    def _wake_for_run(self, run_id: int) -> None:
        if run_id in self._runs:
            self._unread[run_id] = None
            self._wake.set()

    def _wake_for_feed(self) -> None:
        if self._feed is not None:
            self._feed_is_unread = True
            self._wake.set()

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._run(), name="hub"),
            asyncio.create_task(self._repeat_following(), name="hub-following"),
        ]

    async def _stop(self) -> None:
        for task in self._tasks:
            await cancel_and_wait(task)
        await self.reader.stop()

    async def _repeat_following(self) -> None:
        while True:
            await asyncio.sleep(FOLLOWING_INTERVAL)
            if self._runs or self._feed is not None:
                self._relay.notify_following()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        poll_at = loop.time()
        while True:
            self._wake.clear()
            if loop.time() >= poll_at:
                self.wake_for_all()
                poll_at = loop.time() + jittered(POLL_INTERVAL)
            if self._unread or self._feed_is_unread:
                async with self._errors.logged():
                    await self._update_runs()
                    await self._update_feed()
                await asyncio.sleep(READ_INTERVAL)
            else:
                await wait_for_event(self._wake, max(0.0, poll_at - loop.time()))

    async def _update_runs(self) -> None:
        unread = [run_id for run_id in self._unread if run_id in self._runs]
        afters = {run_id: self._runs[run_id].read for run_id in unread[:RUNS_AT_ONCE]}
        self._unread = dict.fromkeys(unread[RUNS_AT_ONCE:])
        if not afters:
            return
        try:
            pages = await self.reader.new_pages(afters)
        except BaseException:
            self._unread.update(dict.fromkeys(afters))
            raise
        for run_id, after in afters.items():
            channel = self._runs.get(run_id)
            # A new channel, if all followers left and another one came during the read.
            if channel is None or channel.read != after:
                continue
            page = pages.get(run_id)
            if page is None:
                channel.mark_pruned()
                continue
            channel.add(page)
            self._update_weight(channel)
            if page.events and channel.read < page.total:
                self._wake_for_run(run_id)

    async def _update_feed(self) -> None:
        channel = self._feed
        if channel is None or not self._feed_is_unread:
            return
        # Before the read: a change that is notified during the read may not be in it.
        self._feed_is_unread = False
        try:
            numbering, batches = await self.reader.new_batches(channel.read)
        except BaseException:
            self._feed_is_unread = True
            raise
        if channel is self._feed:
            channel.extend(batches)
            self._feed_is_unread |= channel.read < numbering.last_number or not numbering.complete

    def _update_weight(self, channel: RunChannel) -> None:
        """Update the weight of a channel; while the total is too high, empty the channel with the oldest update."""
        self._total_weight += channel.weight - self._weights.pop(channel, 0)
        self._weights[channel] = channel.weight
        while self._total_weight > MAX_RUNS_WEIGHT:
            oldest = next(iter(self._weights))
            self._total_weight -= self._weights.pop(oldest)
            oldest.clear()


def run_unknown(run_id: int) -> RunUnknown:
    return RunUnknown(f"there is no run {run_id}; it may have been pruned after its retention")
