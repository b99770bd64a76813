"""The link: this instance's one dedicated session, which holds its presence lock.

It runs in a thread with a synchronous connection, so that a handler that blocks the event loop does not stop it. It
writes a heartbeat once a second and waits for notifications in between. Guarantees:

- While `holds()` is true, PostgreSQL holds this instance's presence lock, and no leader may declare it gone. It becomes
  false by the local clock alone, `PATIENCE` after the last answered heartbeat *was sent*. The server's `LEASE` is twice
  as long: an instance that is frozen or cut off stops acting before the server releases its lock.
- An identity that was declared gone is never used again. The instance first drops everything it held under it
  (`on_identity_lost`) and only then joins again, with a new id.

    the link                             the instance
    breaks                               stops claiming (`on_broken`) and reconnects at once
    is up again, row still live          continues with the same id; nothing was lost
    is up again, row gone                drops everything, joins again
    cannot be opened                     retries four times a second without end, and holds nothing
    joins again, its name is now taken   drains and leaves (`on_refused`): no two instances of one name

Notifications only save time: the answer to the next heartbeat has what a lost notification requested.
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

from app.fleet.cluster.registry import Identity, Registration, Registry, Session
from app.fleet.db import preflight
from app.fleet.db.direct import LEASE, PATIENCE, DirectSession, open_session
from app.fleet.db.namespace import Statement
from app.fleet.errors import FleetError
from app.fleet.telemetry.logs import event_log
from app.fleet.telemetry.redaction import redact

LISTEN = Statement('LISTEN "{channel}"')

HEARTBEAT_INTERVAL = 1.0
RETRY_INTERVAL = 0.05
MAX_RETRY_INTERVAL = 0.25
DROP_TIMEOUT = 5.0

log = event_log(__name__)


def clock() -> float:
    """Return seconds of a clock that also runs while the machine sleeps, unlike CLOCK_MONOTONIC."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def ignore(*_: Any) -> None:
    """Do nothing: the default of every callback."""


@dataclass
class Callbacks:
    """Called in the link's thread; they must not block, except `on_identity_lost`, which waits for what it drops."""

    on_joined: Callable[[Identity], None] = ignore
    on_broken: Callable[[str], None] = ignore
    on_identity_lost: Callable[[Identity], None] = ignore
    on_drain_requested: Callable[[str], None] = ignore
    on_refused: Callable[[FleetError], None] = ignore
    on_linked: Callable[[], None] = ignore
    on_notification: Callable[[str], None] = ignore
    # After an answered heartbeat, with the session, for what must be renewed as often. It may run a short statement.
    on_heartbeat: Callable[[Session, Identity], None] = ignore


@dataclass
class LeaveRequest:
    reason: str
    shutdown: list[dict[str, Any]] = field(default_factory=list)
    recorded: bool = False


class Link:
    """Opened by `join`, closed by `leave`; everything between happens in its thread."""

    def __init__(self, address: str, registry: Registry, registration: Registration, callbacks: Callbacks) -> None:
        # For the metrics.
        self.breaks = self.relinks = self.identities_lost = 0
        self.last_heartbeat_seconds = 0.0
        self.relinked_at: float | None = None
        # Returns the number of runs here, for the registry; called in the link's thread.
        self.running: Callable[[], int] = lambda: 0
        self._address = address
        self._registry = registry
        self._registration = registration
        self._callbacks = callbacks
        self._state = "starting"
        # One for each `announce` whose state the registry does not have yet.
        self._announcements: deque[Future[None]] = deque()
        self._identity: Identity | None = None
        self._backend_pid = 0
        self._marker: int | None = None
        self._trusted_until = 0.0
        self._clock_ahead: float | None = None
        self._drain_reported = False
        self._leave_request: LeaveRequest | None = None
        self._joined: Future[Identity] = Future()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    @property
    def identity(self) -> Identity | None:
        return self._identity

    @property
    def marker(self) -> int | None:
        """The key of an advisory lock that only the present session holds (`preflight`); None while there is none."""
        return self._marker if self.holds() else None

    def holds(self) -> bool:
        """Whether this instance may act as holder of anything right now."""
        return self._identity is not None and clock() < self._trusted_until

    def join(self) -> Identity:
        """Start the thread and wait until the instance is in the registry, or was refused."""
        self._thread.start()
        return self._joined.result()

    def announce(self, state: str) -> Future[None]:
        """Write this instance's state to the registry at once; the future is done when it is written."""
        announced: Future[None] = Future()
        self._state = state
        self._announcements.append(announced)
        self.wake()
        return announced

    def wake(self) -> None:
        """Send the next heartbeat at once. Any thread may call this; it does not wait."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"!")

    def leave(self, reason: str, shutdown: list[dict[str, Any]], timeout: float) -> bool:
        """Mark the row gone, release the presence lock, end the thread; return false if the row was not written."""
        if not self._thread.is_alive():
            return False
        self._leave_request = request = LeaveRequest(reason, shutdown)
        self.wake()
        self._thread.join(timeout)
        return request.recorded

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._stay_linked()
        except FleetError as error:
            self._refused(error)
        except Exception as error:
            # A defect in the link. An instance must not run without its link, so it shuts down in order.
            self._refused(FleetError(f"the link failed: {error!r}"))
            raise

    def _stay_linked(self) -> None:
        interval = RETRY_INTERVAL
        while True:
            try:
                with open_session(self._address, application=self._application(), lease=LEASE) as session:
                    session.add_notify_handler(self._on_notify)
                    self._attach(session)
                    interval = RETRY_INTERVAL
                    self._beat_until_leave(session)
                    return
            except (psycopg.Error, OSError) as error:
                if not self._joined.done():
                    self._joined.set_exception(error)
                    return
                self._broken(error)
                if self._leave_request is not None:
                    return
                self._wait(interval)
                # Otherwise this wake would end each of the next waits, too: the link would retry without a pause.
                self._clear_wakes()
                interval = min(interval * 1.5, MAX_RETRY_INTERVAL)

    def _attach(self, session: DirectSession) -> None:
        """Resume the identity on this session if its row is still live; otherwise join with a new one."""
        session.execute(self._registry.namespace.sql(LISTEN))
        sent = clock()
        if self._identity is not None and not self._resume(session, self._identity):
            self._drop(self._identity)
            session.execute("SELECT pg_advisory_unlock_all()")
            sent = clock()
        if self._identity is None and self._leave_request is None:
            self._identity = self._registry.join(session, self._registration, self._state)
            self._drain_reported = False
            log.info("instance.joined", id=self._identity.id, name=self._identity.name)
            self._callbacks.on_joined(self._identity)
        if self._identity is not None:
            # pg_stat_activity then shows the instance's name.
            session.execute("SELECT set_config('application_name', %s, false)", [self._application(self._identity)])
        marker = preflight.new_marker()
        session.execute(preflight.TAKE_MARKER, [marker])
        self._marker = marker
        self._backend_pid = session.info.backend_pid
        self._trusted_until = sent + PATIENCE
        if not self._joined.done() and self._identity is not None:
            self._joined.set_result(self._identity)
        self._callbacks.on_linked()

    def _resume(self, session: DirectSession, identity: Identity) -> bool:
        """Take the presence lock, then the row. In this order, no leader can declare the instance gone in between."""
        deadline = clock() + LEASE + 1
        while not self._registry.take_presence_lock(session, identity.id):
            # The holder is our former session, whose end the server has not noticed, or a leader's `declare_gone`.
            self._registry.end_former_session(session, identity.id, self._backend_pid)
            if clock() > deadline:
                raise psycopg.OperationalError("a former session still holds the presence lock")
            time.sleep(0.02)
        if not self._registry.relink(session, identity):
            return False
        self.relinks += 1
        self.relinked_at = clock()
        log.info("link.up", id=identity.id)
        return True

    def _beat_until_leave(self, session: DirectSession) -> None:
        while self._leave_request is None:
            self._heartbeat(session)
            self._listen(session, until=clock() + HEARTBEAT_INTERVAL)
        identity = self._identity
        if identity is not None:
            self._registry.leave(session, identity.id, self._leave_request.reason, self._leave_request.shutdown)
            self._trusted_until = 0.0
            self._leave_request.recorded = True

    def _heartbeat(self, session: DirectSession) -> None:
        assert self._identity is not None
        # The heartbeat answers only announcements whose state it can have sent.
        sent, announcements = clock(), len(self._announcements)
        before = time.time()
        reply = self._registry.heartbeat(session, self._identity, self._state, self.running(), self._clock_ahead)
        if reply is None:
            raise psycopg.OperationalError("this instance was declared gone")
        self._trusted_until = sent + PATIENCE
        self.last_heartbeat_seconds = clock() - sent
        # Measured at the middle of the round trip and written with the next heartbeat, for operators.
        self._clock_ahead = (before + time.time()) / 2 - reply.now.timestamp()
        for _ in range(announcements):
            announced = self._announcements.popleft()
            # False if its caller has given up waiting; the state is written all the same.
            if announced.set_running_or_notify_cancel():
                announced.set_result(None)
        if reply.drain_requested and not self._drain_reported:
            self._drain_reported = True
            log.info("instance.asked_to_leave", reason=reply.drain_reason)
            self._callbacks.on_drain_requested(reply.drain_reason or "requested")
        self._callbacks.on_heartbeat(session, self._identity)

    def _listen(self, session: DirectSession, until: float) -> None:
        """Wait for notifications until the next heartbeat is due or `wake` is called."""
        socket = session.pgconn.socket
        while (left := until - clock()) > 0:
            ready = self._wait(left, socket)
            if self._wake_read in ready:
                self._clear_wakes()
                return
            if socket in ready:
                session.pgconn.consume_input()
                urgent = False
                while notification := session.pgconn.notifies():
                    urgent |= self._handle(notification.extra.decode())
                if urgent:
                    return

    def _on_notify(self, notification: psycopg.Notify) -> None:
        """Handle a notification that arrived together with the answer to a statement."""
        self._handle(notification.payload)

    def _handle(self, payload: str) -> bool:
        """Pass a notification on; return true if the next heartbeat is due at once."""
        kind, _, rest = payload.partition(":")
        if kind == "drain":
            return self._identity is not None and rest == str(self._identity.id)
        self._callbacks.on_notification(payload)
        return False

    # -- failures -----------------------------------------------------------------------------------------------------

    def _broken(self, error: Exception) -> None:
        if self._trusted_until:
            # Logged once per break, and not for each attempt to reconnect.
            self._trusted_until = 0.0
            self.breaks += 1
            reason = redact(" ".join(str(error).split()))
            log.warning("link.lost", reason=reason)
            self._callbacks.on_broken(reason)

    def _drop(self, lost: Identity) -> None:
        self._trusted_until = 0.0
        self._identity = None
        self.identities_lost += 1
        log.warning("instance.identity_lost", id=lost.id, name=lost.name)
        self._callbacks.on_identity_lost(lost)
        # Operators identify instances by name: use the same one again if it is free.
        self._registration = replace(self._registration, former_name=lost.name)

    def _refused(self, error: FleetError) -> None:
        if not self._joined.done():
            self._joined.set_exception(error)
            return
        log.error("instance.refused", reason=str(error))
        self._callbacks.on_refused(error)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _application(self, identity: Identity | None = None) -> str:
        name = f"/{identity.name}" if identity else ""
        return self._registry.namespace.application(f"link{name}")

    def _clear_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 64):
                pass

    def _wait(self, seconds: float, *descriptors: int) -> set[int]:
        """Wait until `wake` is called or a descriptor is readable. `select` supports only descriptors below 1024."""
        poll = select.poll()
        for descriptor in (self._wake_read, *descriptors):
            poll.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
