"""The locks that this instance holds: their renewal, and the detection that one is lost.

One statement renews all locks of the instance after each heartbeat. It runs in the link's thread, so a task that blocks
the event loop keeps its lock. An instance that holds no lock sends no statement.

A lock is lost as soon as its holder may no longer act. The first two checks guarantee that this happens before the
server may grant the lock to another waiter:

    detected by                           when
    `lose_when_uncertain`, continuously   the link has been broken for `MAX_LINK_BREAK`
    `lose_when_uncertain`, continuously   the lock has expired by this machine's clock
    the renewal                           the row has another token or another holder
    a notification                        an operator released the lock
    the link                              this instance was declared gone

Two holders at the same time must not exist, and are detected all the same: if a renewal finds another holder that was
granted the lock before it had expired by this machine's clock, it inserts a row into `lock_overlaps`. The row is
reported as the anomaly `two_holders`.
"""

import asyncio
from collections.abc import Sequence

from app.fleet.cluster.link import clock
from app.fleet.cluster.member import Member
from app.fleet.cluster.registry import Identity, Session
from app.fleet.coordination.locks import statements
from app.fleet.coordination.locks.held import HeldLock
from app.fleet.db.namespace import Namespace
from app.fleet.telemetry.logs import event_log

# How long the link may be broken before its locks are lost: less than the grace before an instance is declared gone.
MAX_LINK_BREAK = 0.1
CHECK_INTERVAL = 0.05

log = event_log(__name__)


class HeldLocks:
    def __init__(self, namespace: Namespace, member: Member) -> None:
        self.lost = 0
        self._sql = namespace.sql
        self._member = member
        self._held: dict[tuple[str, int], HeldLock] = {}
        self._any_held = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: HeldLock) -> None:
        self._held[held.name, held.token] = held
        self._any_held.set()

    def remove(self, held: HeldLock) -> bool:
        return self._held.pop((held.name, held.token), None) is not None

    # -- losing -------------------------------------------------------------------------------------------------------

    def lose(self, held: HeldLock, reason: str) -> None:
        if self.remove(held):
            self.lost += 1
            log.warning("lock.lost", lock=held.name, token=held.token, reason=reason)
        held.lose(reason)

    def lose_all(self, reason: str) -> None:
        for held in list(self._held.values()):
            self.lose(held, reason)

    def released_by_operator(self, payload: str) -> None:
        """Process the notification that an operator released a lock."""
        instance, token, name = payload.split(":", 2)
        me, held = self._member.identity, self._held.get((name, int(token)))
        if held is not None and me is not None and me.id == int(instance):
            self.lose(held, "an operator released it")

    async def lose_when_uncertain(self) -> None:
        """Lose each lock before the server may grant it to another waiter."""
        up_at = clock()
        while True:
            if not self._held:
                self._any_held.clear()
                await self._any_held.wait()
                up_at = clock()
            await asyncio.sleep(CHECK_INTERVAL)
            now = clock()
            if self._member.holds():
                up_at = now
            for held in list(self._held.values()):
                if now - up_at > MAX_LINK_BREAK:
                    self.lose(held, "the link to PostgreSQL broke")
                elif now > held.expires_at:
                    self.lose(held, "it was not renewed in time")

    # -- renewing, in the link's thread -------------------------------------------------------------------------------

    def renew(self, session: Session, me: Identity) -> None:
        """Renew all locks that are held, after a heartbeat."""
        known = [held for held in list(self._held.values()) if held.owner == me]
        if not known:
            return
        sent = clock()
        values = {"names": [held.name for held in known], "tokens": [held.token for held in known], "me": me.id}
        rows = session.execute(self._sql(statements.RENEW), values).fetchall()
        renewed_by_lock = {(name, token): renewed for name, token, renewed in rows}
        # A lock that was released meanwhile is no longer active: `release` sets that before it sends its statement.
        missing = [held for held in known if (held.name, held.token) not in renewed_by_lock and held.active]
        for held in known:
            renewed = renewed_by_lock.get((held.name, held.token))
            if renewed:
                held.expires_at = sent + held.ttl
            elif renewed is None:
                self._member.in_loop(self.lose, held, "it was taken over")
        if missing:
            self._report_overlaps(session, me, missing)

    def _report_overlaps(self, session: Session, me: Identity, missing: Sequence[HeldLock]) -> None:
        """Report each lock that was granted to another holder while this one still acted as its holder.

        If that happens, rows were changed by hand, a clock stood still, or this package has a defect.
        """
        values = {"names": [held.name for held in missing], "tokens": [held.token for held in missing], "me": me.id}
        others = session.execute(self._sql(statements.READ_OTHER_HOLDERS), values).fetchall()
        answered = clock()
        by_token = {(held.name, held.token): held for held in missing}
        for name, token, other_token, other, seconds in others:
            # By this machine's clock, the other holder was granted the lock at `answered - seconds` or earlier.
            if answered - seconds >= by_token[name, token].expires_at:
                continue
            log.error("lock.two_holders", lock=name, token=token, other=other, other_token=other_token)
            found = {"name": name, "token": token, "instance": me.name, "other_token": other_token, "other": other}
            session.execute(self._sql(statements.INSERT_OVERLAP), found)
