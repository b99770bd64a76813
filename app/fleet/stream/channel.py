"""A channel: the latest events of one run (or rows of the feed) that this instance has read, for all its followers.

A follower is a position in the channel and has no queue of its own: what it has not taken yet is stored once, for all
followers. A channel keeps a bounded number of items and a bounded number of bytes. A follower that comes late or takes
too long reads what is missing from the database, a page at a time.

A follower that has taken everything waits here. When something new has been read, the followers are woken through
`Turns`, a bounded number in each turn of the event loop.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

# How many followers are served in one turn of the event loop.
PER_TURN = 20
# How many turns they let something else go first.
PATIENCE = 10


class Turns:
    """Has followers go on a few at a time, in the order in which they asked.

    Between two turns the event loop serves everything else: without this, a change that 2,000 clients follow would be
    rendered and sent to all of them before the next request is looked at.
    """

    def __init__(self, per_turn: int = PER_TURN, is_busy: Callable[[], bool] = lambda: False) -> None:
        """`is_busy` says that the event loop has something to do that goes first, for at most `PATIENCE` turns."""
        self._per_turn = per_turn
        self._is_busy = is_busy
        self._passed = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def turn(self) -> None:
        """Wait for a turn. A client that sends much waits once for each piece of it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.admit(turn)
        await turn

    def admit(self, waiting: "asyncio.Future[None]") -> None:
        """Give this future its result when its turn comes."""
        self._queue.append(waiting)
        if not self._scheduled:
            self._scheduled = True
            waiting.get_loop().call_soon(self._serve)

    def _serve(self) -> None:
        served = 0
        if self._is_busy() and self._passed < PATIENCE:
            self._passed += 1
            self._queue[0].get_loop().call_soon(self._serve)
            return
        self._passed = 0
        while self._queue and served < self._per_turn:
            waiting = self._queue.popleft()
            # It may have been cancelled, or have waited for long enough.
            if not waiting.done():
                waiting.set_result(None)
                served += 1
        if self._queue:
            self._queue[0].get_loop().call_soon(self._serve)
        else:
            self._scheduled = False


class Numbered(Protocol):
    @property
    def seq(self) -> int:
        """Its number, or that of its last part; the next item's is higher."""
        ...

    @property
    def weight(self) -> int:
        """About how many bytes of memory it takes, what is sent to clients included."""
        ...


T = TypeVar("T", bound=Numbered)

# What a channel keeps, whichever comes first.
KEPT = 1000
KEPT_WEIGHT = 1_048_576


class Channel(Generic[T]):
    def __init__(self, read: int, turns: Turns, most: int | None = None) -> None:
        # Everything from `floor` to `read` is in `last`.
        self.floor = self.read = read
        self.last: deque[T] = deque()
        self.followers = 0
        # Nothing more will come: it is complete, or its run was pruned.
        self.complete = False
        self.forgotten = False
        # About how many bytes are kept.
        self.weight = 0
        self._most = most
        self._turns = turns
        self._waiting: dict[asyncio.Future[None], None] = {}

    def take(self, items: Sequence[T], *, complete: bool = False) -> None:
        """Add what comes after everything that was read so far."""
        self.last.extend(items)
        self.weight += sum(item.weight for item in items)
        while len(self.last) > 1 and (len(self.last) > KEPT or self.weight > (self._most or KEPT_WEIGHT)):
            oldest = self.last.popleft()
            self.floor = oldest.seq
            self.weight -= oldest.weight
        if items:
            self.read = items[-1].seq
        self.complete = complete
        if items or complete:
            self._wake()

    def drop(self) -> None:
        """Keep nothing. Followers that have not taken everything read the rest from the database."""
        self.last.clear()
        self.floor, self.weight = self.read, 0

    def forget(self) -> None:
        self.forgotten = True
        self._wake()

    def after(self, seq: int) -> list[T] | None:
        """Return what came after that number, as far as it was read; None if some of it is not kept any more."""
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
        """Wait for something new, for at most so long; return whether there is. A bare future, for many wait here."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[news] = None
        try:
            async with asyncio.timeout(patience):
                await news
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(news, None)
        return True

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for news in waiting:
            self._turns.admit(news)


# Reads what came after that number; None while the database does not answer.
Page: TypeAlias = Callable[[int], Awaitable[Sequence[T] | None]]


class Following(Generic[T]):
    """A follower: how far it has come."""

    def __init__(self, channel: Channel[T], seq: int, page: Page[T]) -> None:
        self.seq = seq
        # It had everything once, and then took so little that the channel does not keep the next item any more.
        self.fell_behind = False
        self._channel = channel
        self._page = page
        self._was_up = False

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._channel.forgotten or (self._channel.complete and self.seq >= self._channel.read)

    @property
    def forgotten(self) -> bool:
        return self._channel.forgotten

    async def more(self, patience: float | None = None) -> Sequence[T]:
        """Return what comes next; nothing after so long without any, at the end, and while the database is away."""
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
                    # The database does not have it either: go on with what the channel keeps.
                    self.seq = max(self.seq, floor)
            if known:
                self.seq = known[-1].seq
                return known
            self._was_up = True
            if not await self._channel.news(patience):
                break
        return []
