"""This instance as a member of the cluster: its link and its session in the leader queue, as one service.

Rooms above register hooks here: for a lost identity (`on_identity_lost`: cancel what runs, release what is held), for
the transaction that declares any instance gone (`on_gone`), for heartbeats and for notifications. All calls from the
link's thread into the event loop go through `in_loop`.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVarTuple

import psycopg

from app.fleet.background import Service
from app.fleet.cluster.leader import Leader
from app.fleet.cluster.link import DROP_TIMEOUT, Callbacks, Link
from app.fleet.cluster.registry import (
    GoneHook,
    Identity,
    Instance,
    Registration,
    Registry,
    Session,
    list_instances,
)
from app.fleet.db import preflight
from app.fleet.db.direct import open_session
from app.fleet.db.dsn import Addresses
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Database
from app.fleet.errors import FleetError
from app.fleet.lifecycle import Phase
from app.fleet.settings import FleetSettings
from app.fleet.telemetry import logs, tracing
from app.fleet.telemetry.redaction import redact

Arguments = TypeVarTuple("Arguments")

# Beside the pool: the link, and the session in the leader queue.
DIRECT_SESSIONS = 2
ANNOUNCE_TIMEOUT = 0.5
LEAVE_TIMEOUT = 3.0

log = logs.event_log(__name__)


def sessions(settings: FleetSettings) -> int:
    """Return how many PostgreSQL sessions an instance may open. Behind a pooler, its pool opens none itself."""
    return DIRECT_SESSIONS + (0 if settings.pooled else settings.pool_max)


IdentityLostHook = Callable[[Identity], Awaitable[None]]
# Called in the link's thread after each heartbeat, with the link's session.
HeartbeatHook = Callable[[Session, Identity], None]


class Member(Service):
    name = "member"

    def __init__(
        self,
        settings: FleetSettings,
        addresses: Addresses,
        namespace: Namespace,
        database: Database,
        *,
        version: str,
        port: int | None = None,
        on_leave: Callable[[str], None],
    ) -> None:
        """`on_leave` is called with the reason when this instance is asked to drain and end, or must."""
        super().__init__()
        self._addresses = addresses
        self._database = database
        self._gone_hooks: list[GoneHook] = []
        self._identity_lost_hooks: list[IdentityLostHook] = []
        self._elected_hooks: list[Callable[[], None]] = []
        self._linked_hooks: list[Callable[[], None]] = []
        self._heartbeat_hooks: list[HeartbeatHook] = []
        self._listeners: dict[str, Callable[[str], None]] = {}
        self._shutdown_record: Callable[[], list[dict[str, Any]]] = list
        self._last_id: int | None = None
        self._registry = Registry(namespace, self._gone_hooks)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.registration = Registration(
            run_id=database.run_id,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            port=port,
            version=version,
            connections=sessions(settings),
            role=settings.role,
            concurrency=settings.concurrency,
            name=settings.instance_name,
            workspace=settings.workspace,
            workspace_shared=settings.workspace is not None and settings.workspace_force,
        )
        callbacks = Callbacks(
            on_joined=self._joined,
            on_broken=lambda reason: self.in_loop(database.suspect, f"the link broke: {reason}"),
            on_identity_lost=self._identity_lost,
            on_drain_requested=lambda reason: self.in_loop(on_leave, reason),
            on_refused=lambda error: self.in_loop(on_leave, str(error)),
            on_notification=lambda payload: self.in_loop(self._notified, payload),
            on_linked=lambda: self._call_in_loop(self._linked_hooks),
            on_heartbeat=self._heartbeat,
        )
        self.link = Link(addresses.direct, self._registry, self.registration, callbacks)
        database.compare_with(lambda: self.link.marker)
        self.on_linked(database.compare)
        self._reported_connection: float | None = None
        self.on_heartbeat(self._report_connection)
        self.on_heartbeat(self._report_shutdown)
        self.leader = Leader(
            addresses.direct,
            self._registry,
            self.link,
            lambda: self._call_in_loop(self._elected_hooks),
            defers=not settings.role.executes,
        )
        if not settings.role.executes:
            self.on_heartbeat(self.leader.defer_to_candidates)

    # -- for the packages above, before the start ---------------------------------------------------------------------

    def on_gone(self, hook: GoneHook) -> None:
        self._gone_hooks.append(hook)

    def on_identity_lost(self, hook: IdentityLostHook) -> None:
        self._identity_lost_hooks.append(hook)

    def on_elected(self, hook: Callable[[], None]) -> None:
        self._elected_hooks.append(hook)

    def on_linked(self, hook: Callable[[], None]) -> None:
        """Call the hook each time the link comes up: notifications may have been lost before."""
        self._linked_hooks.append(hook)

    def on_heartbeat(self, hook: HeartbeatHook) -> None:
        """Call the hook after each heartbeat, to renew something in one statement if there is anything to renew."""
        self._heartbeat_hooks.append(hook)

    def on_notification(self, kind: str, listener: Callable[[str], None]) -> None:
        """Pass the notifications `kind:rest` to the listener, which receives the rest."""
        self._listeners[kind] = listener

    def count_running(self, running: Callable[[], int]) -> None:
        """Write this number of running runs with each heartbeat. `running` is called in the link's thread."""
        self.link.running = running

    # -- for all packages ---------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity | None:
        return self.link.identity

    @property
    def leading(self) -> bool:
        return self.leader.leading

    def holds(self) -> bool:
        """Whether this instance may act as holder of anything right now (see `link.py`)."""
        return self.link.holds()

    async def instances(self) -> list[Instance]:
        return await list_instances(self._database)

    def in_loop(self, function: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
        """Call a function in the event loop. Any thread may call this."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    async def announce(self, phase: Phase) -> None:
        """Write the phase to the registry; while the database is unavailable, return and write it later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCE_TIMEOUT):
                await asyncio.wrap_future(self.link.announce(phase))

    def step_down(self) -> None:
        """Leave the leader queue for good: a draining instance is no candidate."""
        self.leader.step_down()

    def keep_record(self, record: Callable[[], list[dict[str, Any]]]) -> None:
        """Write what `record` returns to the instance's row: with each heartbeat, and when it leaves.

        The link's thread calls it.
        """
        self._shutdown_record = record

    def hasten_heartbeat(self) -> None:
        """Have the next heartbeat sent at once. This waits for nothing, whether the database answers or not."""
        self.link.wake()

    async def write_final_record(self) -> None:
        """Write the record again on a new session, after everything else is closed."""
        if self._last_id is not None:
            await asyncio.to_thread(self._write_final_record, self._last_id)

    # -- the service --------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self.link.join)
        except psycopg.Error as error:
            raise preflight.translate(error, self._addresses) from error
        if self.registration.workspace_shared:
            log.warning("workspace.shared_by_force", workspace=self.registration.workspace)
        self.leader.start()

    async def _stop(self) -> None:
        self.leader.step_down()
        await asyncio.to_thread(self.leader.join, 1.0)
        recorded = await asyncio.to_thread(self.link.leave, "left", self._shutdown_record(), LEAVE_TIMEOUT)
        if self._last_id is not None:
            log.info("instance.left", recorded=recorded)

    # -- called by the link's thread ----------------------------------------------------------------------------------

    def _joined(self, identity: Identity) -> None:
        self._last_id = identity.id
        logs.identify(instance=identity.name)
        tracing.identify(identity.name)

    def _identity_lost(self, lost: Identity) -> None:
        """Drop everything held under a lost identity and wait for it, but not long if the event loop is blocked."""
        if self._loop is None or not self._identity_lost_hooks:
            return
        dropping: Future[None] = asyncio.run_coroutine_threadsafe(self._drop_all(lost), self._loop)
        try:
            dropping.result(DROP_TIMEOUT)
        except TimeoutError:
            # Late writes are refused; waiting longer would only delay joining again.
            log.warning("instance.drop_incomplete", id=lost.id, seconds=DROP_TIMEOUT)

    async def _drop_all(self, lost: Identity) -> None:
        for hook in self._identity_lost_hooks:
            await hook(lost)

    def _heartbeat(self, session: Session, me: Identity) -> None:
        for hook in self._heartbeat_hooks:
            hook(session, me)

    def _call_in_loop(self, hooks: Sequence[Callable[[], None]]) -> None:
        for hook in hooks:
            self.in_loop(hook)

    def _notified(self, payload: str) -> None:
        kind, _, rest = payload.partition(":")
        if listener := self._listeners.get(kind):
            listener(rest)

    def _report_connection(self, session: Session, me: Identity) -> None:
        """Write for how long a connection has been borrowed too long, and once more when it is returned."""
        seconds = self._database.borrowed_too_long_seconds()
        if seconds is not None or self._reported_connection is not None:
            self._registry.report_connection(session, me, seconds)
        self._reported_connection = seconds

    def _report_shutdown(self, session: Session, me: Identity) -> None:
        """Write the steps of a shutdown that is under way. `leave` writes them too, so this ends with its begin."""
        if self.running and (steps := self._shutdown_record()):
            self._registry.report_shutdown(session, me, steps)

    def _write_final_record(self, identifier: int) -> None:
        try:
            application = self._registry.namespace.application("record")
            with open_session(self._addresses.direct, application=application) as session:
                self._registry.write_shutdown(session, identifier, self._shutdown_record())
        except (psycopg.Error, FleetError) as error:
            # The log has every step; the row lacks only the last one.
            log.info("shutdown.record_unwritten", reason=redact(str(error)))
