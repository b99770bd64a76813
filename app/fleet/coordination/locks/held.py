"""A lock while it is held, and a request for one: the objects that the modules of this package pass to each other."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple, Self, TypeAlias, get_args

from app.fleet.cluster.registry import Identity
from app.fleet.db.pool.statements import Place
from app.fleet.duration import Duration, format_duration
from app.fleet.errors import LockInvalid, LockLost
from app.fleet.telemetry.logs import who
from app.fleet.validation import check_duration, check_name

# The prefix of the locks of singletons (`coordination/singletons.py`).
RESERVED = "singleton:"
# A holder stops `PATIENCE` after its last heartbeat (`db/direct.py`). The lock must not expire before that.
MIN_TTL = 3.0
MAX_TTL = 3600.0

OnLoss = Literal["cancel", "tell"]
Guard: TypeAlias = Callable[["HeldLock", Place], Awaitable[None]]


class HeldLock:
    """A lock while it is held: its fencing token, and whether it was lost."""

    def __init__(self, guard: Guard, owner: Identity, name: str, token: int, ttl: float, sent: float) -> None:
        """`sent` is when the statement was sent that took the lock or renewed it last."""
        self.name = name
        self.token = token
        # Set when the lock is lost, or may be lost soon.
        self.lost = asyncio.Event()
        self.why_lost: str | None = None
        self.owner = owner
        self.ttl = ttl
        self.taken_at = sent
        # By this machine's clock; before the row expires by PostgreSQL's.
        self.expires_at = sent + ttl
        self.released = False
        # Cancels the block when the lock is lost; None if the block is not to be cancelled.
        self.block: asyncio.Timeout | None = None
        self._guard = guard

    def __repr__(self) -> str:
        return f"<lock {self.name!r}, token {self.token}>"

    @property
    def of_singleton(self) -> bool:
        """Whether it is held, and waited for, as long as instances live: not to be compared with other locks."""
        return self.name.startswith(RESERVED)

    @property
    def active(self) -> bool:
        return not self.released and not self.lost.is_set()

    async def guard(self, place: Place) -> None:
        """Let this transaction commit only while the lock is held. Until it ends, the lock is not granted again."""
        await self._guard(self, place)

    def lose(self, reason: str) -> None:
        if not self.active:
            return
        self.why_lost = reason
        self.lost.set()
        if self.block is not None and not self.block.expired():
            self.block.reschedule(asyncio.get_running_loop().time())


@asynccontextmanager
async def cancelled_on_loss(held: HeldLock, on_loss: OnLoss) -> AsyncIterator[None]:
    """Cancel the block when the lock is lost, and raise `LockLost`; with `on_loss="tell"`, do not."""
    block = asyncio.timeout(None)
    try:
        async with block:
            held.block = block if on_loss == "cancel" else None
            yield
    except TimeoutError:
        if block.expired():
            raise loss_error(held) from None
        raise


def loss_error(held: HeldLock) -> LockLost:
    reason = held.why_lost or "it was taken over"
    return LockLost(f"the lock {held.name!r}, with the token {held.token}, was lost: {reason}")


class LockRequest(NamedTuple):
    """A request of a task here for a lock."""

    name: str
    ttl: float
    # The HTTP request or the run that the lock is for; shown to operators.
    holder: str | None
    # The names of the locks that this task holds already.
    held: Sequence[str] = ()

    @classmethod
    def of(cls, name: str, ttl: Duration, on_loss: str) -> Self:
        """Check the arguments of `lock`, before anything is written."""
        check_name("lock", name, LockInvalid)
        if name.startswith(RESERVED):
            raise LockInvalid(f"{name!r}: names that begin with {RESERVED!r} are reserved for singletons")
        if on_loss not in get_args(OnLoss):
            raise LockInvalid(f"`on_loss` is {on_loss!r}, and must be one of {', '.join(map(repr, get_args(OnLoss)))}")
        seconds = check_duration("ttl", ttl, LockInvalid)
        if not MIN_TTL <= seconds <= MAX_TTL:
            bounds = f"from {format_duration(MIN_TTL)} to {format_duration(MAX_TTL)}"
            raise LockInvalid(
                f"`ttl` is {format_duration(seconds)}, and must be {bounds}: locks are renewed with each heartbeat, "
                f"once a second, and a shorter `ttl` would expire whenever one heartbeat is late"
            )
        return cls(name, seconds, who())
