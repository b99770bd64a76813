"""The hub's reads of the database: new events for the channels, first pages for new followers, and older events.

All reads of an instance borrow at most two connections of the pool at once, whatever the number of followers: one for
new events and first pages, one for older events. No read holds a connection while it waits for a lock.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

import psycopg

from app.fleet.db.pool.pool import Connection, Database
from app.fleet.errors import DatabaseError
from app.fleet.runs.effects import feed
from app.fleet.runs.effects.events import PAGE_EVENTS, EventPage, StoredEvent, read_pages
from app.fleet.runs.effects.feed import Batch
from app.fleet.runs.effects.feed_numbers import Numberer, Numbering
from app.fleet.stream.channel import Numbered, ReadAfter, RunChannel
from app.fleet.stream.pacer import Pacer
from app.fleet.stream.shared_read import SharedRead
from app.fleet.telemetry.logs import event_log

RETRY_INTERVAL = 0.25
# How many runs one statement reads.
RUNS_AT_ONCE = 50
# How many transactions number the feed before another read may use the connection.
NUMBERING_STEPS = 20
NUMBERING_INTERVAL = 0.01
# How often numbering is tried if two sessions assign the same number.
NUMBERING_TRIES = 3

log = event_log(__name__)

Item = TypeVar("Item", bound=Numbered)


class Reader:
    def __init__(self, database: Database, pacer: Pacer) -> None:
        self.reads = 0
        # Action names by id, including all actions in the feed's channel.
        self.names: dict[int, str] = {}
        self._ids: dict[str, int] = {}
        self._database = database
        self._pacer = pacer
        self._numberer = Numberer()
        # Each lets one read at a time borrow a connection.
        self._newer, self._older = asyncio.Semaphore(1), asyncio.Semaphore(1)
        self.first_pages = SharedRead(self._read_first_pages, RUNS_AT_ONCE)
        self.feed_starts = SharedRead(self._read_feed_start, 1)
        self._names_read = SharedRead(self._read_names, 1)
        self._older_pages = SharedRead(self._read_older_pages, 1)
        self._older_batches = SharedRead(self._read_older_batches, 1)

    async def stop(self) -> None:
        for shared in (self.first_pages, self.feed_starts, self._names_read, self._older_pages, self._older_batches):
            await shared.stop()

    async def new_pages(self, afters: Mapping[int, int]) -> dict[int, EventPage]:
        """Read the next events of these runs, after these numbers."""
        async with self._newer:
            return await self.event_pages(afters)

    async def new_batches(self, after: int) -> tuple[Numbering, Sequence[Batch]]:
        """Number the feed, and read the next rows after this number."""
        async with self._newer, self._database.autocommit() as connection:
            return await self._number(connection), await self._read_batches(connection, after)

    def older_events(self, run_id: int) -> ReadAfter[StoredEvent]:
        """Return the function with which a follower reads events that the run's channel no longer has."""
        return none_while_unavailable(lambda after: self._older_pages.get((run_id, after)))

    def older_batches(self) -> ReadAfter[Batch]:
        """Return the function with which a follower reads rows that the feed's channel no longer has."""
        return none_while_unavailable(self._older_batches.get)

    async def count(self, run_id: int) -> int | None:
        """Return how many events a run has; None if it does not exist."""
        async with self._older:
            page = (await self.event_pages({run_id: 0}, limit=1)).get(run_id)
        return None if page is None else page.total

    async def action_id(self, name: str) -> int | None:
        """Return the id of an action, including actions of other releases; None if it does not exist."""
        if name not in self._ids:
            await self._names_read.get(None)
        return self._ids.get(name)

    async def event_pages(self, afters: Mapping[int, int], limit: int = PAGE_EVENTS) -> dict[int, EventPage]:
        self.reads += 1
        async with self._database.autocommit() as connection:
            return await read_pages(connection, self._database.namespace, afters, limit)

    # -- shared reads -------------------------------------------------------------------------------------------------

    async def _read_first_pages(
        self, keys: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], tuple[int, RunChannel]]:
        """Read the first page of each run, after the lowest number of its new followers; return its channel."""
        afters: dict[int, int] = {}
        for run_id, after in keys:
            afters[run_id] = min(after, afters.get(run_id, after))
        pages = await self.new_pages(afters)
        channels = {
            run_id: (page.total, RunChannel(page, min(afters[run_id], page.total), self._pacer))
            for run_id, page in pages.items()
        }
        return {(run_id, after): channels[run_id] for run_id, after in keys if run_id in channels}

    async def _read_feed_start(self, keys: Collection[None]) -> dict[None, Numbering]:
        """Number all rows that are visible now, and return the last number."""
        earlier, tries = self._numberer.in_round, 0
        while True:
            try:
                async with self._newer, self._database.autocommit() as connection:
                    numbering = await self._number(connection)
            except psycopg.errors.UniqueViolation as error:
                # Another session has assigned the same number despite the lock. The next try sees its row.
                tries += 1
                if tries == NUMBERING_TRIES:
                    raise
                log.debug("hub.failed", reason=" ".join(str(error).split()))
            else:
                if not numbering.enabled or (numbering.complete and not earlier):
                    return dict.fromkeys(keys, numbering)
                # The end of a round that began before this call does not count: it numbers no newer rows.
                earlier = earlier and not numbering.complete
            await asyncio.sleep(NUMBERING_INTERVAL)

    async def _read_names(self, keys: Collection[None]) -> dict[None, None]:
        async with self._newer, self._database.autocommit() as connection:
            await self._refresh_names(connection)
        return dict.fromkeys(keys)

    async def _read_older_pages(
        self, keys: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], Sequence[StoredEvent]]:
        found: dict[tuple[int, int], Sequence[StoredEvent]] = {}
        async with self._older:
            for run_id, after in keys:
                if page := (await self.event_pages({run_id: after})).get(run_id):
                    found[run_id, after] = page.events
        return found

    async def _read_older_batches(self, keys: Collection[int]) -> dict[int, Sequence[Batch]]:
        async with self._older, self._database.autocommit() as connection:
            return {after: await self._read_batches(connection, after) for after in keys}

    # -- the feed -----------------------------------------------------------------------------------------------------

    async def _number(self, connection: Connection) -> Numbering:
        """Number the rows that have no number, in at most `NUMBERING_STEPS` transactions."""
        for _ in range(NUMBERING_STEPS):
            self.reads += 1
            numbering = await self._numberer.step(connection, self._database.namespace)
            if numbering.complete or numbering.busy:
                break
        return numbering

    async def _read_batches(self, connection: Connection, after: int) -> Sequence[Batch]:
        self.reads += 1
        batches = await feed.read_batches(connection, self._database.namespace, after)
        if any(not self.names.keys() >= set(batch.actions) for batch in batches):
            await self._refresh_names(connection)
        return batches

    async def _refresh_names(self, connection: Connection) -> None:
        self.names = await feed.action_names(connection, self._database.namespace)
        self._ids = {name: identifier for identifier, name in self.names.items()}


def none_while_unavailable(read: Callable[[int], Awaitable[Sequence[Item] | None]]) -> ReadAfter[Item]:
    """Wrap a read: while the database is unavailable, it waits and returns None, so that the follower tries again."""

    async def wrapped(after: int) -> Sequence[Item] | None:
        try:
            return await read(after) or []
        except (psycopg.Error, DatabaseError) as error:
            log.debug("hub.failed", reason=" ".join(str(error).split()))
            await asyncio.sleep(RETRY_INTERVAL)
            return None

    return wrapped
