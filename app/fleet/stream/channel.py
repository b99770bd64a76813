"""A channel: the latest events of a run, or rows of the feed, that this instance has read, for all their followers.

A follower is a position in the channel and has no queue of its own: an item is stored once for all followers. A channel
keeps a bounded number of items and a bounded number of bytes. A follower that begins late, or takes too long, reads the
items that the channel no longer has from the database, a page at a time.

A follower that has received everything waits in the channel. When the hub adds new items, the pacer resumes the waiting
followers (`pacer.py`).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

from app.fleet.runs.effects.events import EventPage, StoredEvent
from app.fleet.stream.pacer import Pacer

# How many items a channel keeps, and how many bytes, whichever comes first.
MAX_ITEMS = 1000
MAX_WEIGHT = 1_048_576


class Numbered(Protocol):
    @property
    def seq(self) -> int:
        """The item's number, or the number of its last part; the next item has a higher number."""
        ...

    @property
    def weight(self) -> int:
        """About how many bytes of memory the item takes, including its encoded form for clients."""
        ...


T = TypeVar("T", bound=Numbered)


class Channel(Generic[T]):
    def __init__(self, read: int, pacer: Pacer, max_weight: int | None = None) -> None:
        # `items` has everything after the number `floor`, up to the number `read`.
        self.floor = self.read = read
        self.items: deque[T] = deque()
        self.followers = 0
        # Nothing more will come: all was read (`complete`), or the run no longer exists (`pruned`).
        self.complete = False
        self.pruned = False
        # About how many bytes the items take.
        self.weight = 0
        self._max_weight = max_weight
        self._pacer = pacer
        self._waiting: dict[asyncio.Future[None], None] = {}

    def extend(self, items: Sequence[T], *, complete: bool = False) -> None:
        """Add the items that follow everything read so far, and resume the followers."""
        self.items.extend(items)
        self.weight += sum(item.weight for item in items)
        while len(self.items) > 1 and (len(self.items) > MAX_ITEMS or self.weight > (self._max_weight or MAX_WEIGHT)):
            oldest = self.items.popleft()
            self.floor = oldest.seq
            self.weight -= oldest.weight
        if items:
            self.read = items[-1].seq
        self.complete = complete
        if items or complete:
            self._resume_followers()

    def clear(self) -> None:
        """Remove all items. Followers that have not received all of them read the rest from the database."""
        self.items.clear()
        self.floor, self.weight = self.read, 0

    def mark_pruned(self) -> None:
        self.pruned = True
        self._resume_followers()

    def after(self, seq: int) -> list[T] | None:
        """Return the items after this number that were read so far; None if some of them are no longer kept."""
        if seq < self.floor:
            return None
        found = []
        for item in reversed(self.items):
            if item.seq <= seq:
                break
            found.append(item)
        found.reverse()
        return found

    async def wait(self, timeout: float | None) -> bool:
        """Wait for new items; return False after the timeout. A bare future, because there are many followers."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None
        try:
            async with asyncio.timeout(timeout):
                await waiting
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(waiting, None)
        return True

    def _resume_followers(self) -> None:
        resumed, self._waiting = self._waiting, {}
        for waiting in resumed:
            self._pacer.enqueue(waiting)


class RunChannel(Channel[StoredEvent]):
    def __init__(self, page: EventPage, after: int, pacer: Pacer) -> None:
        super().__init__(after, pacer)
        self.action_id = page.action_id
        self.add(page)

    def add(self, page: EventPage) -> None:
        last = page.events[-1].seq if page.events else self.read
        self.extend(page.events, complete=page.ended and last >= page.total)


# Reads the items after a number from the database; returns None while the database is unavailable.
ReadAfter: TypeAlias = Callable[[int], Awaitable[Sequence[T] | None]]


class Follower(Generic[T]):
    """A follower: the number of the last item that it has received."""

    def __init__(self, channel: Channel[T], seq: int, read_after: ReadAfter[T]) -> None:
        self.seq = seq
        # It had received everything once, and then so little that the channel no longer has the next item.
        self.fell_behind = False
        self._channel = channel
        self._read_after = read_after
        self._was_current = False

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._channel.pruned or (self._channel.complete and self.seq >= self._channel.read)

    @property
    def pruned(self) -> bool:
        return self._channel.pruned

    async def more(self, timeout: float | None = None) -> Sequence[T]:
        """Return the next items; none after the timeout, at the end, and while the database is unavailable."""
        while not self.ended:
            items = self._channel.after(self.seq)
            if items is None:
                self.fell_behind = self._was_current
                floor = self._channel.floor
                page = await self._read_after(self.seq)
                if page is None:
                    break
                items = list(page)
                if not items:
                    # The database no longer has them either: continue with the items of the channel.
                    self.seq = max(self.seq, floor)
            if items:
                self.seq = items[-1].seq
                return items
            self._was_current = True
            if not await self._channel.wait(timeout):
                break
        return []
