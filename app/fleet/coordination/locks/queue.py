"""The queue for locks: how a task of this instance waits, and how a lock is granted to it.

A waiter is a row of `lock_waiters`. Waiters are granted a lock in the order of their ids, each by the statement that
releases the lock: it writes the waiter's instance into the lock's row, deletes the waiter's row and sends a
notification. The waiter then renews the lock, because the notification may be old, and begins its block.

Notifications can be lost, and a release skips rows that another transaction has locked. So each waiter also polls:
after `MIN_POLL_INTERVAL` at first, then at growing intervals up to `MAX_POLL_INTERVAL`, and at once when the link is up
again. A poll grants free locks to their next waiters, and reads what was granted to the waiters of this instance.

    a poll finds                                    the waiter
    that it was granted the lock                    begins its block
    its row in the queue                            goes on waiting
    neither: it was granted the lock, and let the   queues again
    `ttl` expire without a notification
    that it waits, directly or through others, for  fails with `LockCycle`, if it is the newest waiter of the cycle
    a lock that its own task holds
"""

import asyncio
from collections.abc import Sequence

from app.fleet.background import jittered, wait_for_event
from app.fleet.cluster.member import Member
from app.fleet.cluster.registry import Identity
from app.fleet.coordination.locks import statements
from app.fleet.coordination.locks.held import LockRequest
from app.fleet.coordination.locks.rows import (
    BACKOFF,
    LINK_CHECK_INTERVAL,
    MAX_POLL_INTERVAL,
    MIN_POLL_INTERVAL,
    LockRows,
)
from app.fleet.errors import LockCycle


class Waiter:
    """A task of this instance that waits in the queue."""

    def __init__(self, identifier: int, request: LockRequest) -> None:
        self.id = identifier
        self.request = request
        # The token; None if this waiter's row is gone, and the task must queue again.
        self.granted: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.poll_at = 0.0
        self._polls = 0
        self.schedule_poll()

    def grant(self, token: int | None) -> None:
        if not self.granted.done():
            self.granted.set_result(token)

    def schedule_poll(self) -> None:
        """Schedule the next poll, after a longer interval each time."""
        interval = jittered(min(MIN_POLL_INTERVAL * BACKOFF**self._polls, MAX_POLL_INTERVAL))
        self._polls += 1
        self.poll_at = asyncio.get_running_loop().time() + interval


class LockQueue:
    """The waiters of this instance."""

    def __init__(self, rows: LockRows, member: Member) -> None:
        self.waiters: dict[int, Waiter] = {}
        self._rows = rows
        self._member = member
        self._poll_needed = asyncio.Event()

    async def enter(self, request: LockRequest, me: Identity) -> Waiter | None:
        """Enter the queue; if the caller is cancelled meanwhile, leave it again. None if this identity is gone."""
        waiter = await self._rows.background.finish_or_undo(self._insert(request, me), self.leave)
        if waiter is None:
            # The instance was declared gone a moment ago, and joins anew.
            await asyncio.sleep(LINK_CHECK_INTERVAL)
        return waiter

    async def _insert(self, request: LockRequest, me: Identity) -> Waiter | None:
        with self._rows.writing(request.name):
            rows = await self._rows.fetch(statements.ENTER_QUEUE, self._rows.values(request, me))
            if not rows:
                return None
            waiter = self.waiters[rows[0][0]] = Waiter(rows[0][0], request)
            self._rows.waiters.add(waiter.id)
            self._poll_needed.set()
            return waiter

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter whose row is deleted already."""
        del self.waiters[waiter.id]
        self._rows.waiters.discard(waiter.id)

    def leave(self, waiter: Waiter) -> None:
        self.remove(waiter)
        self._rows.background.start(self._rows.leave_queue(waiter.request.name, waiter.id))

    # -- notifications ------------------------------------------------------------------------------------------------

    def granted(self, payload: str) -> None:
        """Process the notification that a waiter was granted its lock."""
        instance, waiter_id, token = (int(part) for part in payload.split(":"))
        me = self._member.identity
        if me is None or me.id != instance:
            return
        if waiter := self.waiters.get(waiter_id):
            waiter.grant(token)
        else:
            self._rows.orphans_suspected.set()

    def poll_now(self) -> None:
        """Poll for all waiters: notifications may have been lost."""
        for waiter in self.waiters.values():
            waiter.poll_at = 0.0
        self._poll_needed.set()

    def queue_again(self) -> None:
        """Let all waiters queue again, under a new identity."""
        for waiter in self.waiters.values():
            waiter.grant(None)

    # -- polling ------------------------------------------------------------------------------------------------------

    async def poll_when_due(self) -> None:
        while True:
            now = asyncio.get_running_loop().time()
            due = [waiter for waiter in self.waiters.values() if waiter.poll_at <= now and not waiter.granted.done()]
            if due:
                for waiter in due:
                    waiter.schedule_poll()
                await self._poll(due)
            self._poll_needed.clear()
            next_poll = min((waiter.poll_at for waiter in self.waiters.values()), default=None)
            now = asyncio.get_running_loop().time()
            await wait_for_event(self._poll_needed, None if next_poll is None else max(0.0, next_poll - now))

    async def _poll(self, due: Sequence[Waiter]) -> None:
        me = self._member.identity
        if me is None or not self._member.holds():
            return
        await self._rows.fetch(statements.GRANT_FREE, {"names": sorted({waiter.request.name for waiter in due})})
        values = {"me": me.id, "waiters": [waiter.id for waiter in due]}
        tokens = dict(await self._rows.fetch(statements.READ_WAITERS, values))
        for waiter in due:
            token = tokens.get(waiter.id)
            if token is not None or waiter.id not in tokens:
                waiter.grant(token)
        for waiter in due:
            if waiter.request.held and not waiter.granted.done():
                await self._check_deadlock(waiter)

    async def _check_deadlock(self, waiter: Waiter) -> None:
        request = waiter.request
        values = {"name": request.name, "held": list(request.held), "waiter": waiter.id}
        rows = await self._rows.fetch(statements.FIND_DEADLOCK, values)
        if rows and not waiter.granted.done():
            cycle = " → ".join(map(repr, rows[0][0]))
            waiter.granted.set_exception(
                LockCycle(
                    f"deadlock: this task holds {', '.join(map(repr, request.held))} and waits for {request.name!r}, "
                    f"whose holder waits for this task ({cycle}): take locks in the same order everywhere"
                )
            )
