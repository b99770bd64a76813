"""A channel: the last of what was read here of something that is followed, and everyone here who follows it.

Who follows has a place in it, and no queue: what they have not taken stays in the channel, once for everyone. The
channel keeps no more than so many, and so many bytes. Who comes late, or takes too long, reads what is missing from
the database, a page at a time; nothing is held in memory for anyone.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar


class Numbered(Protocol):
    @property
    def seq(self) -> int:
        """The number of it, or of its last part; the next one's is higher."""
        ...

    @property
    def weight(self) -> int:
        """About how many bytes it is."""
        ...


T = TypeVar("T", bound=Numbered)

# What a channel keeps, whatever comes first.
KEPT = 1000
KEPT_WEIGHT = 1_048_576


class Channel(Generic[T]):
    def __init__(self, read: int) -> None:
        # Everything from `floor` to `read` is in `last`.
        self.floor = self.read = read
        self.last: deque[T] = deque()
        self.followers = 0
        # No more will come: it is complete, or it was forgotten.
        self.complete = False
        self.forgotten = False
        self._weight = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def take(self, items: Sequence[T], *, complete: bool = False) -> None:
        """Take what comes after all that was read so far."""
        self.last.extend(items)
        self._weight += sum(item.weight for item in items)
        while len(self.last) > 1 and (len(self.last) > KEPT or self._weight > KEPT_WEIGHT):
            oldest = self.last.popleft()
            self.floor = oldest.seq
            self._weight -= oldest.weight
        if items:
            self.read = items[-1].seq
        self.complete = complete
        if items or complete:
            self._tell()

    def forget(self) -> None:
        self.forgotten = True
        self._tell()

    def after(self, seq: int) -> list[T] | None:
        """What came after that number, as far as it was read; None if that is not here any more."""
        if seq < self.floor:
            return None
        news = []
        for item in reversed(self.last):
            if item.seq <= seq:
                break
            news.append(item)
        news.reverse()
        return news

    async def news(self, patience: float | None) -> bool:
        """Wait until there is something new, or for that long; say which. Many wait here, so it is a bare one."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(news)
        try:
            async with asyncio.timeout(patience):
                await news
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(news)
        return True

    def _tell(self) -> None:
        for news in self._waiting:
            if not news.done():
                news.set_result(None)


# Reads what came after that number; None while the database does not answer.
Page: TypeAlias = Callable[[int], Awaitable[Sequence[T] | None]]


class Following(Generic[T]):
    """One who follows: how far they have come."""

    def __init__(self, channel: Channel[T], seq: int, page: Page[T]) -> None:
        self.seq = seq
        # They had everything once, and then did not take it for so long that the channel has it no more.
        self.fell_behind = False
        self._channel = channel
        self._page = page
        self._was_up = False

    @property
    def ended(self) -> bool:
        """There is nothing more to come."""
        return self._channel.forgotten or (self._channel.complete and self.seq >= self._channel.read)

    @property
    def forgotten(self) -> bool:
        return self._channel.forgotten

    async def more(self, patience: float | None = None) -> Sequence[T]:
        """Return what comes next; nothing if nothing came for so long, or if it has ended, or in an outage."""
        while not self.ended:
            known = self._channel.after(self.seq)
            if known is None:
                self.fell_behind = self._was_up
                floor = self._channel.floor
                page = await self._page(self.seq)
                if page is None:
                    break
                known = list(page)
                if not known:
                    # It is not in the database either. What the channel has is what there is.
                    self.seq = max(self.seq, floor)
            if known:
                self.seq = known[-1].seq
                return known
            self._was_up = True
            if not await self._channel.news(patience):
                break
        return []
