"""Named locks: at most one task in the whole cluster holds a lock, each time with a new fencing token.

    async with lock("reports", ttl="10s", wait="30s") as held:
        async with transaction() as session:
            await held.guard(session)       # commits only while the lock is held
            …

A lock is a row of `service_locks`. The row is never deleted, so its token only grows. A lock is free if it has no
holder, if its holder has not renewed it within its `ttl`, or if its holder's instance is gone.

Guarantees:

- No guarded transaction commits after a transaction that was guarded with a later token, even if a holder was frozen or
  cut off. `guard` locks the row FOR KEY SHARE if it still has the token. A statement that increments the token first
  locks the row FOR UPDATE, which is possible only when the guarded transaction has ended.
- A dead instance does not block a lock: the transaction that declares the instance gone grants its locks to the next
  waiters.
- The waiter that has waited longest is granted the lock, by the statement that releases it, and a notification reports
  it. A new caller does not overtake waiters (`queue.py`).
- A holder stops before the server may grant the lock to another: its block is cancelled when the link to PostgreSQL is
  lost, or when the lock was not renewed, was released by an operator or was taken over (`renewal.py`).

    event                                    the lock is free                   the block
    it ends, or raises                       at once                            has ended
    its process is killed                    when its instance is declared      has ended
                                             gone, in a fraction of a second
    its process is frozen or cut off         after `ttl`, or when its instance  is cancelled before that, or when the
                                             is declared gone                   process continues
    the link breaks for less than            not at all                         continues
    `MAX_LINK_BREAK`
    an operator releases the lock            at once                            is cancelled
    the release cannot be written            as soon as it can be written, at   has ended
                                             the latest after `ttl`
    the answer to taking the lock is lost    when this instance finds the       does not begin
                                             orphaned row (`rows.py`), at the
                                             latest after `ttl`
    the server crashes right after the       after `ttl`                        has ended
    release

No statement here waits for a locked row, except an operator's release: the row may be locked by a guarded transaction
of the caller itself. Skipped rows and lost notifications are found by polling (`queue.py`).

Lock order: locks by name, then their waiters, then the waiters' instances. The last two are locked with SKIP LOCKED.

Not guaranteed: that effects outside of guarded transactions are exclusive. A cancelled block can take its time, and
what it sends to other systems can arrive after what its successor sends. Send the token along, and compare it there.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar

from app.fleet.background import LoopErrors, Service, cancel_and_wait
from app.fleet.cluster.link import clock
from app.fleet.cluster.member import Member
from app.fleet.cluster.registry import BATCH, Identity, Session
from app.fleet.coordination.locks import statements
from app.fleet.coordination.locks.held import (
    RESERVED,
    HeldLock,
    LockRequest,
    OnLoss,
    cancelled_on_loss,
    loss_error,
)
from app.fleet.coordination.locks.queue import LockQueue
from app.fleet.coordination.locks.renewal import HeldLocks
from app.fleet.coordination.locks.rows import MIN_POLL_INTERVAL, LockRows
from app.fleet.db.pool.pool import Database
from app.fleet.db.pool.statements import Place, fetch
from app.fleet.duration import format_duration
from app.fleet.errors import LockCycle, LockLost, LockTaken
from app.fleet.telemetry import tracing
from app.fleet.telemetry.logs import event_log
from app.fleet.telemetry.metrics import LOCK_HELD, LOCK_WAIT

RETRY_INTERVAL = 0.05

log = event_log(__name__)

# The locks that this task holds, or a task that started it.
held_here: ContextVar[tuple[HeldLock, ...]] = ContextVar("flotilla_locks", default=())


class Locks(Service):
    """The locks that one instance holds, and the locks that its tasks wait for."""

    name = "locks"

    def __init__(self, database: Database, member: Member) -> None:
        super().__init__()
        self.taken = 0
        self.refused = 0
        self._sql = database.namespace.sql
        self._member = member
        self._rows = LockRows(database, member)
        self._queue = LockQueue(self._rows, member)
        self._held = HeldLocks(database.namespace, member)
        self._tasks: list[asyncio.Task[None]] = []
        member.on_gone(self._instance_died)
        member.on_identity_lost(self._identity_lost)
        member.on_heartbeat(self._held.renew)
        member.on_linked(self._linked)
        member.on_notification("granted", self._queue.granted)
        member.on_notification("released", self._held.released_by_operator)

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def waiting(self) -> int:
        return len(self._queue.waiters)

    @property
    def lost(self) -> int:
        return self._held.lost

    @asynccontextmanager
    async def hold(self, request: LockRequest, wait: float | None, on_loss: OnLoss) -> AsyncIterator[HeldLock]:
        """Hold a lock while the block runs. Its loss cancels the block, unless `on_loss` is "tell"."""
        mine = tuple(held for held in held_here.get() if held.active)
        if any(held.name == request.name for held in mine):
            raise LockCycle(f"this task holds the lock {request.name!r} already, and would wait for itself")
        # Singletons wait as long as another instance runs them.
        alone = request.name.startswith(RESERVED)
        with nullcontext() if alone else tracing.spanning("lock", {"flotilla.lock": request.name}):
            held = await self.take(request._replace(held=[held.name for held in mine]), wait)
        held_here.set((*mine, held))
        try:
            async with cancelled_on_loss(held, on_loss):
                yield held
        finally:
            still_held = await self.release(held)
        if on_loss == "cancel" and not still_held:
            raise loss_error(held)

    async def take(self, request: LockRequest, wait: float | None) -> HeldLock:
        """Take a lock, or wait for it: for `wait` seconds, or without a limit if that is None."""
        began = clock()
        try:
            async with asyncio.timeout(wait or None):
                while self._member.holds() or wait != 0:
                    me = await self._rows.identity()
                    held = await self._take(request, me)
                    if held is None and wait == 0:
                        break
                    held = held or await self._wait(request, me)
                    if held is not None:
                        self.taken += 1
                        if not held.of_singleton:
                            LOCK_WAIT.observe(clock() - began)
                        return held
        except TimeoutError:
            pass
        raise LockTaken(await self._why_taken(request.name, wait))

    async def release(self, held: HeldLock) -> bool:
        """Release a lock, and grant it to the next waiter; false if it had another holder already."""
        held.released = True
        if not held.of_singleton:
            LOCK_HELD.observe(clock() - held.taken_at)
        self._held.remove(held)
        return await asyncio.shield(self._rows.background.start(self._rows.release(held.name, held.token, held.owner)))

    async def guard(self, held: HeldLock, place: Place) -> None:
        values = {"name": held.name, "token": held.token, "me": held.owner.id}
        if held.released or not await fetch(place, self._sql(statements.GUARD), values):
            self.refused += 1
            log.warning("lock.refused", lock=held.name, token=held.token)
            self._held.lose(held, "it was taken over")
            raise LockLost(
                f"the lock {held.name!r} is no longer held with the token {held.token}, so this transaction, which is "
                f"guarded by it, cannot commit"
            )

    # -- taking -------------------------------------------------------------------------------------------------------

    async def _take(self, request: LockRequest, me: Identity) -> HeldLock | None:
        """Take a free lock; if the caller is cancelled meanwhile, release it again."""

        def undo(held: HeldLock) -> None:
            self._rows.background.start(self.release(held))

        return await self._rows.background.finish_or_undo(self._try_to_take(request, me), undo)

    async def _try_to_take(self, request: LockRequest, me: Identity) -> HeldLock | None:
        with self._rows.writing(request.name):
            sent = clock()
            rows = await self._rows.fetch(statements.TAKE, self._rows.values(request, me))
            return self._add(request, me, rows[0][0], sent) if rows else None

    async def _wait(self, request: LockRequest, me: Identity) -> HeldLock | None:
        """Wait in the queue; None if the row in the queue was lost, and the caller must try again."""
        waiter = await self._queue.enter(request, me)
        if waiter is None:
            return None
        held = None
        try:
            token = await waiter.granted
            held = await self._confirm(request, me, token) if token is not None else None
        finally:
            if held is None:
                self._queue.leave(waiter)
            else:
                self._queue.remove(waiter)
        return held

    async def _confirm(self, request: LockRequest, me: Identity, token: int) -> HeldLock | None:
        """Renew a lock that was granted: the notification may be old."""
        values = {"names": [request.name], "tokens": [token], "me": me.id}
        sent = clock()
        while rows := await self._rows.fetch(statements.RENEW, values):
            if rows[0][2]:
                return self._add(request, me, token, sent)
            # The lock is ours, and another session has locked its row: for a moment, if that session polls.
            await asyncio.sleep(MIN_POLL_INTERVAL)
            sent = clock()
        return None

    def _add(self, request: LockRequest, me: Identity, token: int, sent: float) -> HeldLock | None:
        if self._member.identity != me:
            # Taken under an identity that was declared gone: that transaction has released the lock, or will.
            return None
        held = HeldLock(self.guard, me, request.name, token, request.ttl, sent)
        self._held.add(held)
        self._rows.locks.add((held.name, held.token))
        return held

    async def _why_taken(self, name: str, wait: float | None) -> str:
        rows = await self._rows.fetch(statements.READ_HOLDER, {"name": name})
        instance, holder, since = rows[0] if rows else (None, None, None)
        in_time = f"within {format_duration(wait)}" if wait else "at once"
        text = f"the lock {name!r} was not free {in_time}."
        if not instance:
            return text
        return f"{text} It is held by {instance}{f' ({holder})' if holder else ''} since {since:%Y-%m-%d %H:%M:%S %Z}."

    # -- events of the instance ---------------------------------------------------------------------------------------

    def _linked(self) -> None:
        """Find what happened while the link was down: notifications and answers may have been lost."""
        if self.running:
            self._rows.orphans_suspected.set()
        self._queue.poll_now()

    def _instance_died(self, session: Session, dead: Sequence[int]) -> bool:
        """Grant the locks of dead instances, in the transaction that declares them gone; true if there may be more."""
        values = {"dead": list(dead)}
        session.execute(self._sql(statements.DELETE_WAITERS_OF_DEAD), values)
        return len(session.execute(self._sql(statements.GRANT_LOCKS_OF_DEAD), values).fetchall()) == BATCH

    async def _identity_lost(self, _lost: Identity) -> None:
        self._held.lose_all("this instance was declared gone")
        self._queue.queue_again()

    # -- the service --------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        loops = {
            "queue": self._queue.poll_when_due,
            "renewal": self._held.lose_when_uncertain,
            "orphans": self._rows.release_orphans_when_suspected,
        }
        self._tasks = [
            asyncio.create_task(self._run_forever(name, loop), name=f"locks-{name}") for name, loop in loops.items()
        ]

    async def _stop(self) -> None:
        for task in self._tasks:
            await cancel_and_wait(task)
        await self._rows.background.stop()

    async def _run_forever(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        errors = LoopErrors(
            log,
            service=f"locks, {name}",
            defect="cluster.defect",
            failed="locks.failed",
            retry_interval=RETRY_INTERVAL,
            what=name,
        )
        while True:
            async with errors.logged():
                await loop()
