"""The link: this instance's one dedicated session, whose life is the instance's life.

It runs in a thread with a synchronous connection, so that a handler that blocks the event loop does not look dead.
Once a second it beats; between two beats it waits for notifications. What it guarantees:

- While `holds()` is true, PostgreSQL holds this instance's presence lock, and nobody may declare it gone. It turns
  false by the clock alone, `PATIENCE` after the last beat that was answered *was sent*, and the server's `LEASE` is
  twice as long: an instance that is frozen or cut off stops acting before the server lets go of it.
- An identity that was declared gone is never used again. Whatever was held under it is dropped first (`on_lost`), and
  only then does the instance join again, under a new id.

    the link                         the instance
    breaks                           stops claiming (`on_broken`), tries at once to take it up again
    is up again, row still living    goes on, same id; nothing was lost
    is up again, row gone            drops everything, joins anew
    cannot be opened                 tries for ever, four times a second, holding nothing
    joins anew, name taken by now    drains and leaves (`on_refused`): two instances of one name are worse than none

Notifications only make things quick. The heartbeat's answer carries what a lost one would have said.
"""

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg

from app.fleet.cluster.registry import Identity, Register, Registration, Session
from app.fleet.db import preflight
from app.fleet.db.direct import LEASE, PATIENCE, DirectSession, open_session
from app.fleet.db.namespace import Statement
from app.fleet.errors import FleetError
from app.fleet.telemetry.logs import events
from app.fleet.telemetry.redaction import redact

LISTEN = Statement('LISTEN "{channel}"')

BEAT = 1.0
RETRY = 0.05
RETRY_MOST = 0.25
DROP_PATIENCE = 5.0

log = events(__name__)


def clock() -> float:
    """Seconds that also pass while the machine sleeps, which CLOCK_MONOTONIC's do not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def nothing(*_: Any) -> None:
    """Do nothing: the default of every callback."""


@dataclass
class Callbacks:
    """What the link tells. All are called in its thread and must not block, `on_lost` excepted: it drops everything."""

    on_joined: Callable[[Identity], None] = nothing
    on_broken: Callable[[str], None] = nothing
    on_lost: Callable[[Identity], None] = nothing
    on_drain_requested: Callable[[str], None] = nothing
    on_refused: Callable[[FleetError], None] = nothing
    on_linked: Callable[[], None] = nothing
    on_notification: Callable[[str], None] = nothing
    # After an answered heartbeat, with the session: for what must be renewed as often. It may ask, and must be quick.
    on_beat: Callable[[Session, Identity], None] = nothing


@dataclass
class Figures:
    """Counts for the metrics."""

    breaks: int = 0
    relinks: int = 0
    identities_lost: int = 0
    last_beat_seconds: float = 0.0


class Link:
    """Opened by `join`, closed by `leave`; everything between happens in its thread."""

    def __init__(
        self,
        address: str,
        register: Register,
        wanted: Registration,
        callbacks: Callbacks,
        running: Callable[[], int] = lambda: 0,
    ) -> None:
        """`running` counts what runs here, for the register; called in the link's thread."""
        self.figures = Figures()
        self.relinked_at: float | None = None
        self._address = address
        self._register = register
        self._wanted = wanted
        self._tell = callbacks
        self._running = running
        self._state = "starting"
        self._saying: deque[Future[None]] = deque()
        self._identity: Identity | None = None
        self._backend_pid = 0
        self._mark: int | None = None
        self._trusted_until = 0.0
        self._ahead: float | None = None
        self._drain_told = False
        self._farewell: Farewell | None = None
        self._joined: Future[Identity] = Future()
        self._waker, self._wake = os.pipe()
        os.set_blocking(self._waker, False)
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    @property
    def identity(self) -> Identity | None:
        return self._identity

    @property
    def mark(self) -> int | None:
        """The number of an advisory lock that only the link's present session has; None while there is none."""
        return self._mark if self.holds() else None

    def holds(self) -> bool:
        """Whether this instance may act as holder of anything right now."""
        return self._identity is not None and clock() < self._trusted_until

    def join(self) -> Identity:
        """Start the thread and wait until the instance is in the register, or was refused."""
        self._thread.start()
        return self._joined.result()

    def say(self, state: str) -> Future[None]:
        """Say at once what state this instance is in. The answer comes when the register has it."""
        said: Future[None] = Future()
        self._state = state
        self._saying.append(said)
        self._poke()
        return said

    def leave(self, reason: str, shutdown: list[dict[str, Any]], timeout: float) -> bool:
        """Mark the row gone, let the presence lock go, end the thread. False if it could not be said in time."""
        if not self._thread.is_alive():
            return False
        self._farewell = farewell = Farewell(reason, shutdown)
        self._poke()
        self._thread.join(timeout)
        return farewell.said

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._stay_linked()
        except FleetError as error:
            self._refused(error)
        except Exception as error:
            # A defect of ours. Without its link an instance must not stay; it leaves in order.
            self._refused(FleetError(f"the link failed: {error!r}"))
            raise

    def _stay_linked(self) -> None:
        wait = RETRY
        while True:
            try:
                with open_session(self._address, application=self._application(), lease=LEASE) as session:
                    session.add_notify_handler(self._overhear)
                    self._attach(session)
                    wait = RETRY
                    self._live(session)
                    return
            except (psycopg.Error, OSError) as error:
                if not self._joined.done():
                    self._joined.set_exception(error)
                    return
                self._broken(error)
                if self._farewell is not None:
                    return
                self._wait(wait)
                wait = min(wait * 1.5, RETRY_MOST)

    def _attach(self, session: DirectSession) -> None:
        """Become somebody on this session: who we were, if that still stands; otherwise somebody new."""
        session.execute(self._register.namespace.sql(LISTEN))
        sent = clock()
        if self._identity is not None and not self._resume(session, self._identity):
            self._drop(self._identity)
            session.execute("SELECT pg_advisory_unlock_all()")
            sent = clock()
        if self._identity is None and self._farewell is None:
            self._identity = self._register.join(session, self._wanted, self._state)
            self._drain_told = False
            log.info("instance.joined", id=self._identity.id, name=self._identity.name)
            self._tell.on_joined(self._identity)
        if self._identity is not None:
            # So that pg_stat_activity says whose session it is.
            session.execute("SELECT set_config('application_name', %s, false)", [self._application(self._identity)])
        mark = preflight.new_mark()
        session.execute(preflight.TAKE_MARK, [mark])
        self._mark = mark
        self._backend_pid = session.info.backend_pid
        self._trusted_until = sent + PATIENCE
        if not self._joined.done() and self._identity is not None:
            self._joined.set_result(self._identity)
        self._tell.on_linked()

    def _resume(self, session: DirectSession, identity: Identity) -> bool:
        """Take the presence lock and the row up again. The lock first, so that no verdict can fall in between."""
        deadline = clock() + LEASE + 1
        while not self._register.take_presence(session, identity.id):
            # Our own former session, whose end the server has not noticed yet; or a verdict being written right now.
            self._register.end_former_session(session, identity.id, self._backend_pid)
            if clock() > deadline:
                raise psycopg.OperationalError("the presence lock stays taken by a former session")
            time.sleep(0.02)
        if not self._register.relink(session, identity):
            return False
        self.figures.relinks += 1
        self.relinked_at = clock()
        log.info("link.up", id=identity.id)
        return True

    def _live(self, session: DirectSession) -> None:
        """Beat and listen until told to leave."""
        while self._farewell is None:
            self._beat(session)
            self._listen(session, until=clock() + BEAT)
        identity = self._identity
        if identity is not None:
            self._register.leave(session, identity.id, self._farewell.reason, self._farewell.shutdown)
            self._trusted_until = 0.0
            self._farewell.said = True

    def _beat(self, session: DirectSession) -> None:
        assert self._identity is not None
        sent, saying = clock(), len(self._saying)
        before = time.time()
        answer = self._register.beat(session, self._identity, self._state, self._running(), self._ahead)
        if answer is None:
            raise psycopg.OperationalError("this instance was declared gone")
        self._trusted_until = sent + PATIENCE
        self.figures.last_beat_seconds = clock() - sent
        # Of the middle between question and answer; said with the next heartbeat, for people to read.
        self._ahead = (before + time.time()) / 2 - answer.now.timestamp()
        for _ in range(saying):
            said = self._saying.popleft()
            # False for one whose waiter has given up: it was said all the same.
            if said.set_running_or_notify_cancel():
                said.set_result(None)
        if answer.asked_to_leave and not self._drain_told:
            self._drain_told = True
            log.info("instance.asked_to_leave", reason=answer.reason)
            self._tell.on_drain_requested(answer.reason or "requested")
        self._tell.on_beat(session, self._identity)

    def _listen(self, session: DirectSession, until: float) -> None:
        """Wait for notifications, a poke, or the next beat."""
        wire = session.pgconn.socket
        while (left := until - clock()) > 0:
            ready = self._wait(left, wire)
            if self._waker in ready:
                self._drain_pokes()
                return
            if wire in ready:
                session.pgconn.consume_input()
                urgent = False
                while notification := session.pgconn.notifies():
                    urgent |= self._hear(notification.extra.decode())
                if urgent:
                    return

    def _overhear(self, notification: psycopg.Notify) -> None:
        """Take a notification that came in beside the answer to a statement."""
        self._hear(notification.payload)

    def _hear(self, payload: str) -> bool:
        """Pass a notification on; true if the next beat should come at once."""
        kind, _, rest = payload.partition(":")
        if kind == "drain":
            return self._identity is not None and rest == str(self._identity.id)
        self._tell.on_notification(payload)
        return False

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def _broken(self, error: Exception) -> None:
        if self._trusted_until:
            # Said once per break; the attempts that follow are only waiting.
            self._trusted_until = 0.0
            self.figures.breaks += 1
            reason = redact(" ".join(str(error).split()))
            log.warning("link.lost", reason=reason)
            self._tell.on_broken(reason)

    def _drop(self, lost: Identity) -> None:
        self._trusted_until = 0.0
        self._identity = None
        self.figures.identities_lost += 1
        log.warning("instance.identity_lost", id=lost.id, name=lost.name)
        self._tell.on_lost(lost)
        # Operators know instances by their names: take the same one again if nobody else has.
        self._wanted = replace(self._wanted, former_name=lost.name)

    def _refused(self, error: FleetError) -> None:
        if not self._joined.done():
            self._joined.set_exception(error)
            return
        log.error("instance.refused", reason=str(error))
        self._tell.on_refused(error)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _application(self, identity: Identity | None = None) -> str:
        whose = f"/{identity.name}" if identity else ""
        return f"flotilla/{self._register.namespace.name}/link{whose}"[:63]

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake, b"!")

    def _drain_pokes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._waker, 64):
                pass

    def _wait(self, seconds: float, *wires: int) -> set[int]:
        """Wait until a poke comes, or something on these wires. `poll`, because `select` knows 1,024 files only."""
        waiting = select.poll()
        for wire in (self._waker, *wires):
            waiting.register(wire, select.POLLIN)
        return {wire for wire, _ in waiting.poll(seconds * 1000)}


@dataclass
class Farewell:
    reason: str
    shutdown: list[dict[str, Any]] = field(default_factory=list)
    said: bool = False
