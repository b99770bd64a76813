"""Locks with a name, held by one task in the whole cluster, each time with a token that nobody had before.

    async with lock("reports", ttl="10s", wait="30s") as held:
        async with transaction() as session:
            await held.guard(session)       # commits only while the lock is ours
            …

A lock is a row of `service_locks`. The row outlives the lock, so that its token only ever grows. It is free when nobody
has it, when whoever has it has not renewed it for its `ttl`, and when its instance is gone. What it promises:

- Of what is guarded, nothing commits after something that was guarded with a later token, whoever was frozen, cut off
  or overtaken in between. `guard` locks the row FOR KEY SHARE if it still has the token, and whatever moves the token
  takes the row FOR UPDATE first: not before the guarded transaction has ended.
- It is not kept from the living by the dead. The transaction of an instance's death passes its locks on.
- It is passed on to whoever waits longest, in the very statement that releases it, and a notification tells that one.
  Newcomers do not overtake those who wait in the queue (`lock_waiters`).
- A holder stops before the server may let another in: its body is cancelled as soon as the link does not hold any more,
  or the lock was not renewed, was released by an operator, or was taken over.

All locks of an instance are renewed by one statement after a heartbeat, in the link's thread, so that a body which
blocks the event loop keeps its lock. An instance that holds none asks nothing.

    what happens                             the lock is free                  the body
    it ends, or raises                       at once                           has ended
    its process is killed                    with the verdict, in a fraction   is gone
                                             of a second
    it is frozen, or cut off                 after `ttl`, or with the verdict  is cancelled before, or when it thaws
    its link breaks for less than `HOLD_ON`  not at all                        goes on
    an operator releases it                  at once                           is cancelled
    the release cannot be written            as soon as it can, at the latest  has ended
                                             after `ttl`
    the answer to taking it is lost          as soon as this instance finds    does not begin
                                             the row, at the latest after `ttl`
    the server crashes right after its       after `ttl`: nobody renews it     has ended
    release

Rows can be left behind under an instance's id: a place in the queue whose caller has given up while the database was
away, or a lock whose taking was committed and not answered. Such a row would keep a lock from everyone for a whole
`ttl`. So whenever a statement fails, a link is up again, or a lock is passed on to a waiter that is not known here, the
instance reads its own rows (`_release_strays`) and releases each that no task here knows. A row that a statement under
way may have written is left for the next look.

That two act as holders at once is not believed, and looked for all the same: a renewal that finds another one in a lock
of ours, let in before ours was over by our own clock, writes it down (`lock_overlaps`), and it is an anomaly.

No statement here waits for a row that somebody has locked, the operator's excepted: it may be a guarded transaction of
the caller's own. What had to be skipped, and what no notification told, is seen by who waits: they look, soon at first
and then ever more rarely.

Lock order: locks by name, then those who wait, then their instances; the last two are skipped where they are taken.

What it does not promise: that nobody acts on what is not guarded. A body that is cancelled may take its time, and what
it sends outside may arrive after its successor's. Send the token along.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeVar, get_args

import psycopg

from app.fleet.background import Service, cancel_and_wait, wait_for_event
from app.fleet.cluster.link import clock
from app.fleet.cluster.member import Member
from app.fleet.cluster.registry import BATCH, Identity, Session
from app.fleet.coordination.locks.statements import (
    CIRCLE,
    FORGET_WAITERS,
    GUARD,
    LET_GO,
    NOTE_OVERLAP,
    OTHERS,
    OWN,
    PASS_ON_FREE,
    PASS_ON_OF_DEAD,
    PASS_ON_UNCLAIMED,
    RELEASE,
    RENEW,
    STANDING,
    STILL_UNCLAIMED,
    STOP_WAITING,
    TAKE,
    WAIT,
    WHO_HAS,
)
from app.fleet.db.namespace import Statement
from app.fleet.db.pool import Database
from app.fleet.db.statements import Place, fetch
from app.fleet.duration import Duration, format_duration
from app.fleet.errors import DatabaseError, LockCycle, LockInvalid, LockLost, LockTaken
from app.fleet.telemetry.logs import events, request_id
from app.fleet.validation import check_duration, check_name

Answer = TypeVar("Answer")
OnLoss = Literal["cancel", "tell"]

# What the names of the fleet's own begin with (`coordination/singletons.py`).
RESERVED = "singleton:"
# A holder gives up on its own `PATIENCE` after its last heartbeat; nobody else may be let in before that.
TTL_LEAST = 3.0
TTL_MOST = 3600.0
# How long a link may be broken before the bodies are cancelled. Less than the grace before a verdict.
HOLD_ON = 0.1
TICK = 0.05
# How soon one who waits looks, although nobody told: at first, and in the end.
LOOK_FIRST = 0.05
LOOK_MOST = 5.0
GROWTH = 2.0
AGAIN = 0.25
# A statement whose connection broke has ended in the server by then: `client_connection_check_interval` is 1 s.
LATE = 3.0
AFTER_DEFECT = 1.0

log = events(__name__)


class HeldLock:
    """A lock while it is held: its token, and the news of its loss."""

    def __init__(self, locks: "Locks", me: Identity, name: str, token: int, ttl: float, sent: float) -> None:
        """`sent` is when the statement was sent that took it or renewed it last."""
        self.name = name
        self.token = token
        # Set when it is not ours any more, or may soon not be.
        self.lost = asyncio.Event()
        self.why_lost: str | None = None
        self.me = me
        self.ttl = ttl
        self.until = sent + ttl
        self.over = False
        # What ends the body, if its loss is to end it.
        self.body: asyncio.Timeout | None = None
        self._locks = locks

    def __repr__(self) -> str:
        return f"<lock {self.name!r}, token {self.token}>"

    @property
    def active(self) -> bool:
        return not self.over and not self.lost.is_set()

    async def guard(self, place: Place) -> None:
        """Let this transaction commit only while the lock is ours: nobody is let in before it has ended."""
        await self._locks.guard(self, place)

    def lose(self, why: str) -> None:
        if not self.active:
            return
        self.why_lost = why
        self.lost.set()
        if self.body is not None and not self.body.expired():
            self.body.reschedule(asyncio.get_running_loop().time())


class Wanted(NamedTuple):
    """A lock that somebody here wants."""

    name: str
    ttl: float
    # Who, for operators: the request or the run.
    holder: str | None
    # The locks that this task holds already.
    held: Sequence[str] = ()

    @classmethod
    def of(cls, name: str, ttl: Duration, on_loss: str) -> Self:
        """Check what was asked for, before anything is written."""
        check_name("lock", name, LockInvalid)
        if name.startswith(RESERVED):
            raise LockInvalid(f"{name!r}: names that begin with {RESERVED!r} are kept for singletons")
        if on_loss not in get_args(OnLoss):
            raise LockInvalid(f"`on_loss` is {on_loss!r}, and must be one of {', '.join(map(repr, get_args(OnLoss)))}")
        lasts = check_duration("ttl", ttl, LockInvalid)
        if not TTL_LEAST <= lasts <= TTL_MOST:
            bounds = f"from {format_duration(TTL_LEAST)} to {format_duration(TTL_MOST)}"
            raise LockInvalid(
                f"`ttl` is {format_duration(lasts)}, and must be {bounds}: it is "
                f"renewed with each heartbeat, once a second, and a shorter one is lost whenever one of them is late"
            )
        return cls(name, lasts, request_id.get())


class Waiting:
    """One who waits in the queue."""

    def __init__(self, identifier: int, wanted: Wanted) -> None:
        self.id = identifier
        self.wanted = wanted
        # The token; nothing if its place is lost, and it is to wait anew.
        self.granted: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.look_at = 0.0
        self.looks = 0
        self.put_off()

    def grant(self, token: int | None) -> None:
        if not self.granted.done():
            self.granted.set_result(token)

    def put_off(self) -> None:
        """Look later, and the longer it takes the later."""
        gap = min(LOOK_FIRST * GROWTH**self.looks, LOOK_MOST) * random.uniform(0.75, 1.25)
        self.looks += 1
        self.look_at = asyncio.get_running_loop().time() + gap


# What this task, and those that it was started by, hold.
holding: ContextVar[tuple[HeldLock, ...]] = ContextVar("flotilla_locks", default=())


@asynccontextmanager
async def ended_with(held: HeldLock, on_loss: OnLoss) -> AsyncIterator[None]:
    """Cancel the block if the lock is lost, and say so."""
    body = asyncio.timeout(None)
    try:
        async with body:
            held.body = body if on_loss == "cancel" else None
            yield
    except TimeoutError:
        if body.expired():
            raise gone(held) from None
        raise


def gone(held: HeldLock) -> LockLost:
    why = held.why_lost or "it was taken over"
    return LockLost(f"the lock {held.name!r}, with the token {held.token}, was lost: {why}")


class Locks(Service):
    """The locks of one instance: those it holds, and those that somebody here waits for."""

    name = "locks"

    def __init__(self, database: Database, member: Member) -> None:
        super().__init__()
        self.taken = 0
        self.lost = 0
        self.refused = 0
        self._database = database
        self._member = member
        self._sql = database.namespace.sql
        self._held: dict[tuple[str, int], HeldLock] = {}
        self._waiting: dict[int, Waiting] = {}
        # Each name and token from its taking to the end of its release, also of a lock that was lost meanwhile.
        self._unreleased: set[tuple[str, int]] = set()
        # The statements under way that may make or end a row of ours, each an object of its own, by the lock's name.
        self._under_way: dict[str, set[object]] = {}
        # Set when there may be rows of ours that no task knows.
        self._strays = asyncio.Event()
        # Rows that no task knows, and the statements that were under way when each was seen first: it may be theirs.
        self._suspects: dict[tuple[Any, ...], set[object]] = {}
        self._anyone_waits = asyncio.Event()
        self._any_held = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        # What is on its way although nobody waits for it any more.
        self._errands: set[asyncio.Task[Any]] = set()
        member.on_death(self._died)
        member.on_lost(self._identity_lost)
        member.on_beat(self._renew)
        member.on_linked(self._look_now)
        member.on_notification("granted", self._granted)
        member.on_notification("released", self._released)

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # -- taking and releasing -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def hold(self, wanted: Wanted, wait: float | None, on_loss: OnLoss) -> AsyncIterator[HeldLock]:
        """Hold a lock while the block lasts. Its loss ends the block, unless it is only to be told."""
        mine = tuple(held for held in holding.get() if held.active)
        if any(held.name == wanted.name for held in mine):
            raise LockCycle(f"this task has the lock {wanted.name!r} already, and would wait for itself")
        held = await self.take(wanted._replace(held=[held.name for held in mine]), wait)
        holding.set((*mine, held))
        try:
            async with ended_with(held, on_loss):
                yield held
        finally:
            still_ours = await self.release(held)
        if on_loss == "cancel" and not still_ours:
            raise gone(held)

    async def take(self, wanted: Wanted, wait: float | None) -> HeldLock:
        """Take a lock, or wait for it for so long."""
        try:
            async with asyncio.timeout(wait or None):
                while self._member.holds() or wait != 0:
                    me = await self._identity()
                    held = await self._take(wanted, me)
                    if held is None and wait == 0:
                        break
                    held = held or await self._wait(wanted, me)
                    if held is not None:
                        self.taken += 1
                        return held
        except TimeoutError:
            pass
        raise LockTaken(await self._who_has(wanted.name, wait))

    async def release(self, held: HeldLock) -> bool:
        """Release it, and pass it on; false if it was not ours any more."""
        held.over = True
        self._held.pop((held.name, held.token), None)
        return await asyncio.shield(self._errand(self._release(held)))

    async def guard(self, held: HeldLock, place: Place) -> None:
        values = {"name": held.name, "token": held.token, "me": held.me.id}
        if held.over or not await fetch(place, self._sql(GUARD), values):
            self.refused += 1
            log.warning("lock.refused", lock=held.name, token=held.token)
            self._lose(held, "it was taken over")
            raise LockLost(
                f"the lock {held.name!r} is not held any more, and nothing that is guarded by its token "
                f"{held.token} can be written"
            )

    async def _take(self, wanted: Wanted, me: Identity) -> HeldLock | None:
        """Take it if it is free; if the caller has gone meanwhile, it is released again."""
        return await self._to_its_end(self._try_to_take(wanted, me), lambda held: self._errand(self.release(held)))

    async def _try_to_take(self, wanted: Wanted, me: Identity) -> HeldLock | None:
        with self._settling(wanted.name):
            sent = clock()
            rows = await self._fetch(TAKE, {"name": wanted.name, **self._holder(wanted, me)})
            return self._hold(wanted, me, rows[0][0], sent) if rows else None

    async def _wait(self, wanted: Wanted, me: Identity) -> HeldLock | None:
        """Stand in the queue; None if that has come to nothing, and is to be tried again."""
        waiting = await self._to_its_end(self._enter_queue(wanted, me), self._leave_queue)
        if waiting is None:
            # Declared gone a moment ago; who we are next will be told.
            await asyncio.sleep(TICK)
            return None
        held = None
        try:
            token = await waiting.granted
            held = await self._confirm(wanted, me, token) if token is not None else None
        finally:
            if held is None:
                self._leave_queue(waiting)
            else:
                del self._waiting[waiting.id]
        return held

    async def _enter_queue(self, wanted: Wanted, me: Identity) -> Waiting | None:
        with self._settling(wanted.name):
            rows = await self._fetch(WAIT, {"name": wanted.name, "held": list(wanted.held), **self._holder(wanted, me)})
            if not rows:
                return None
            waiting = self._waiting[rows[0][0]] = Waiting(rows[0][0], wanted)
            self._anyone_waits.set()
            return waiting

    def _leave_queue(self, waiting: Waiting) -> None:
        del self._waiting[waiting.id]
        self._errand(self._stop_waiting(waiting))

    async def _confirm(self, wanted: Wanted, me: Identity, token: int) -> HeldLock | None:
        """Renew what we were let into: the news of it may be old."""
        sent = clock()
        values = {"names": [wanted.name], "tokens": [token], "me": me.id}
        rows = await self._fetch(RENEW, values)
        return self._hold(wanted, me, token, sent) if rows and rows[0][2] else None

    def _hold(self, wanted: Wanted, me: Identity, token: int, sent: float) -> HeldLock | None:
        held = HeldLock(self, me, wanted.name, token, wanted.ttl, sent)
        if self._member.identity != me:
            # Taken by who we were: that one's death has released it, or will.
            return None
        self._held[held.name, token] = held
        self._unreleased.add((held.name, token))
        self._any_held.set()
        return held

    async def _release(self, held: HeldLock) -> bool:
        values = {"name": held.name, "token": held.token, "me": held.me.id}
        try:
            with self._settling(held.name):
                if await self._fetch(RELEASE, values):
                    return True
                if not await self._fetch(LET_GO, values):
                    return False
        except (psycopg.Error, DatabaseError) as error:
            # From now on it is a row that no task knows.
            log.info("lock.released_later", lock=held.name, token=held.token, reason=" ".join(str(error).split()))
            return True
        finally:
            self._unreleased.discard((held.name, held.token))
        self._errand(self._pass_on_later(held))
        return True

    async def _pass_on_later(self, held: HeldLock) -> None:
        """Pass a lock on that was let go while a transaction was guarded by it; until then ever more rarely."""
        gap = LOOK_FIRST
        values = {"name": held.name, "token": held.token}
        with suppress(psycopg.Error, DatabaseError):
            while not await self._fetch(PASS_ON_UNCLAIMED, values) and await self._fetch(STILL_UNCLAIMED, values):
                await asyncio.sleep(gap)
                gap = min(gap * GROWTH, LOOK_MOST)

    async def _stop_waiting(self, waiting: Waiting) -> None:
        """Leave the queue. If the row is there no more, the lock may have been passed on to us meanwhile."""
        with suppress(psycopg.Error, DatabaseError), self._settling(waiting.wanted.name):
            if not await self._fetch(STOP_WAITING, {"waiter": waiting.id}):
                self._strays.set()

    async def _who_has(self, name: str, wait: float | None) -> str:
        rows = await self._fetch(WHO_HAS, {"name": name})
        instance, holder, since = rows[0] if rows else (None, None, None)
        who = f" It is held by {instance}" + (f" ({holder})" if holder else "") if instance else ""
        since_when = f" since {since:%Y-%m-%d %H:%M:%S %Z}." if instance else ""
        in_time = f"within {format_duration(wait)}" if wait else "at once"
        return f"the lock {name!r} was not free {in_time}.{who}{since_when}"

    # -- those who wait -----------------------------------------------------------------------------------------------

    async def _look_for_ever(self) -> None:
        while True:
            now = asyncio.get_running_loop().time()
            due = [each for each in self._waiting.values() if each.look_at <= now and not each.granted.done()]
            if due:
                for each in due:
                    each.put_off()
                await self._look(due)
            self._anyone_waits.clear()
            next_look = min((each.look_at for each in self._waiting.values()), default=None)
            now = asyncio.get_running_loop().time()
            await wait_for_event(self._anyone_waits, None if next_look is None else max(0.0, next_look - now))

    async def _look(self, due: Sequence[Waiting]) -> None:
        """See what no notification told."""
        me = self._member.identity
        if me is None or not self._member.holds():
            return
        names = sorted({each.wanted.name for each in due})
        await self._fetch(PASS_ON_FREE, {"names": names})
        standing = dict(await self._fetch(STANDING, {"me": me.id, "waiters": [each.id for each in due]}))
        for each in due:
            token = standing.get(each.id)
            if token is not None or each.id not in standing:
                each.grant(token)
        for each in due:
            if each.wanted.held and not each.granted.done():
                await self._look_for_circle(each)

    async def _look_for_circle(self, waiting: Waiting) -> None:
        wanted = waiting.wanted
        values = {"name": wanted.name, "held": list(wanted.held), "waiter": waiting.id}
        rows = await self._fetch(CIRCLE, values)
        if rows and not waiting.granted.done():
            circle = " → ".join(map(repr, rows[0][0]))
            waiting.granted.set_exception(
                LockCycle(
                    f"this task holds {', '.join(map(repr, wanted.held))} and waits for {wanted.name!r}, whose holder "
                    f"waits for it in turn ({circle}): take locks in the same order everywhere"
                )
            )

    # -- what no task knows of ----------------------------------------------------------------------------------------

    @contextmanager
    def _settling(self, name: str) -> Iterator[None]:
        """Run statements that may make or end a row of ours for this lock; if one fails, that is not known."""
        statement = object()
        self._under_way.setdefault(name, set()).add(statement)
        try:
            yield
        except BaseException:
            self._strays.set()
            asyncio.get_running_loop().call_later(LATE, self._strays.set)
            raise
        finally:
            self._under_way[name].discard(statement)
            if not self._under_way[name]:
                del self._under_way[name]

    async def _release_strays_for_ever(self) -> None:
        while True:
            await self._strays.wait()
            # Before the look: what happens meanwhile is for the next one.
            self._strays.clear()
            again = True
            try:
                again = await self._release_strays()
            finally:
                if again:
                    self._strays.set()
            if again:
                await asyncio.sleep(AGAIN)

    async def _release_strays(self) -> bool:
        """Release our rows that no task knows of; true if there were any, or may be."""
        me = await self._identity()
        rows = await self._fetch(OWN, {"me": me.id})
        strays = [row for row in rows if row[:2] not in self._unreleased and row[2] not in self._waiting]
        self._suspects = {row: self._suspects.get(row) or set(self._under_way.get(row[0], ())) for row in strays}
        for row in strays:
            name, token, waiter = row
            if self._suspects[row] & self._under_way.get(name, set()):
                continue
            log.info("lock.stray_released", lock=name, token=token, waiter=waiter)
            if token is None:
                await self._fetch(STOP_WAITING, {"waiter": waiter})
            else:
                await self._release(HeldLock(self, me, name, token, 0.0, 0.0))
        return bool(strays)

    # -- those that are held ------------------------------------------------------------------------------------------

    async def _watch_for_ever(self) -> None:
        """See to it that nobody goes on as a holder when the server may have let another in."""
        up_at = clock()
        while True:
            if not self._held:
                self._any_held.clear()
                await self._any_held.wait()
                up_at = clock()
            await asyncio.sleep(TICK)
            now = clock()
            if self._member.holds():
                up_at = now
            for held in list(self._held.values()):
                if now - up_at > HOLD_ON:
                    self._lose(held, "the link to PostgreSQL broke")
                elif now > held.until:
                    self._lose(held, "it was not renewed in time")

    def _renew(self, session: Session, me: Identity) -> None:
        """Renew all that are held, after a heartbeat; called in the link's thread."""
        known = [held for held in list(self._held.values()) if held.me == me]
        if not known:
            return
        sent = clock()
        values = {"names": [held.name for held in known], "tokens": [held.token for held in known], "me": me.id}
        rows = session.execute(self._sql(RENEW), values).fetchall()
        ours = {(name, token): renewed for name, token, renewed in rows}
        # Not one that was released meanwhile: it is over before that is sent.
        missed = [held for held in known if (held.name, held.token) not in ours and held.active]
        for held in known:
            renewed = ours.get((held.name, held.token))
            if renewed:
                held.until = sent + held.ttl
            elif renewed is None:
                self._member.in_loop(partial(self._lose, held, "it was taken over"))
        if missed:
            self._compare(session, me, missed)

    def _compare(self, session: Session, me: Identity, missed: Sequence[HeldLock]) -> None:
        """See whether somebody was let in while one of ours still acted as holder, and write it down.

        That must not happen; so somebody changed the rows by hand, a clock stood still, or this file is wrong.
        """
        values = {"names": [held.name for held in missed], "tokens": [held.token for held in missed], "me": me.id}
        others = session.execute(self._sql(OTHERS), values).fetchall()
        answered = clock()
        by_token = {(held.name, held.token): held for held in missed}
        for name, token, other_token, other, since in others:
            held = by_token[name, token]
            # By our clock, they were let in at that moment or sooner; ours was over at that time, as it should be.
            if answered - since >= held.until:
                continue
            log.error("lock.two_holders", lock=name, token=token, other=other, other_token=other_token)
            found = {"name": name, "token": token, "instance": me.name, "other_token": other_token, "other": other}
            session.execute(self._sql(NOTE_OVERLAP), found)

    def _lose(self, held: HeldLock, why: str) -> None:
        if self._held.pop((held.name, held.token), None) is not None:
            self.lost += 1
            log.warning("lock.lost", lock=held.name, token=held.token, reason=why)
        held.lose(why)

    # -- told by others -----------------------------------------------------------------------------------------------

    def _granted(self, rest: str) -> None:
        instance, waiter, token = (int(part) for part in rest.split(":"))
        me = self._member.identity
        if me is None or me.id != instance:
            return
        if waiting := self._waiting.get(waiter):
            waiting.grant(token)
        else:
            self._strays.set()

    def _released(self, rest: str) -> None:
        instance, token, name = rest.split(":", 2)
        me, held = self._member.identity, self._held.get((name, int(token)))
        if held is not None and me is not None and me.id == int(instance):
            self._lose(held, "an operator released it")

    def _look_now(self) -> None:
        """Notifications may have been lost, and answers."""
        if self.running:
            self._strays.set()
        for waiting in self._waiting.values():
            waiting.look_at = 0.0
        self._anyone_waits.set()

    def _died(self, session: Session, dead: Sequence[int]) -> bool:
        values = {"dead": list(dead)}
        session.execute(self._sql(FORGET_WAITERS), values)
        return len(session.execute(self._sql(PASS_ON_OF_DEAD), values).fetchall()) == BATCH

    async def _identity_lost(self, _lost: Identity) -> None:
        for held in list(self._held.values()):
            self._lose(held, "this instance was declared gone")
        for waiting in self._waiting.values():
            waiting.grant(None)

    # -- the service --------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._for_ever("look", self._look_for_ever), name="locks-look"),
            asyncio.create_task(self._for_ever("watch", self._watch_for_ever), name="locks-watch"),
            asyncio.create_task(self._for_ever("strays", self._release_strays_for_ever), name="locks-strays"),
        ]

    async def _stop(self) -> None:
        for task in [*self._tasks, *self._errands]:
            await cancel_and_wait(task)

    # -- helpers ------------------------------------------------------------------------------------------------------

    async def _for_ever(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except (psycopg.Error, DatabaseError) as error:
                log.debug("locks.failed", what=what, reason=" ".join(str(error).split()))
                await asyncio.sleep(TICK)
            except Exception as error:  # noqa: BLE001 — a defect of ours must not end it for good
                log.error("cluster.defect", error=error, service=f"locks, {what}")
                await asyncio.sleep(AFTER_DEFECT)

    async def _identity(self) -> Identity:
        """Wait until this instance may act as holder of anything."""
        while (me := self._member.identity) is None or not self._member.holds():  # noqa: ASYNC110 — it is a clock
            await asyncio.sleep(TICK)
        return me

    async def _fetch(self, statement: Statement, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        async with self._database.autocommit() as connection:
            return await fetch(connection, self._sql(statement), values)

    def _holder(self, wanted: Wanted, me: Identity) -> dict[str, Any]:
        return {
            "me": me.id,
            "instance": me.name,
            "hostname": self._member.hostname,
            "pid": self._member.pid,
            "holder": wanted.holder,
            "ttl": timedelta(seconds=wanted.ttl),
        }

    async def _to_its_end(
        self, work: Coroutine[Any, Any, Answer | None], give_back: Callable[[Answer], object]
    ) -> Answer | None:
        """Wait for work that goes on if the caller is cancelled; what comes of it is given back then."""
        task = self._errand(work)

        def abandoned(_: object) -> None:
            if not task.cancelled() and task.exception() is None and (answer := task.result()) is not None:
                give_back(answer)

        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(abandoned)
            raise

    def _errand(self, work: Coroutine[Any, Any, Answer]) -> "asyncio.Task[Answer]":
        errand = asyncio.create_task(work)
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)
        return errand
