"""This instance as a member of the cluster: its link and its place in the queue for leadership, as one service.

Rooms above say here what must happen when the identity is lost (`on_lost`: cancel what runs, let go of what is held),
in the transaction of any instance's death (`on_death`), and on a notification. What is told by the link's thread is
handed to the event loop here, and nowhere else.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg

from app.fleet.background import Service
from app.fleet.cluster.leader import Leader
from app.fleet.cluster.link import DROP_PATIENCE, Callbacks, Figures, Link
from app.fleet.cluster.registry import (
    DeathHook,
    Identity,
    Instance,
    Register,
    Registration,
    Session,
    list_instances,
)
from app.fleet.db import preflight
from app.fleet.db.direct import open_session
from app.fleet.db.dsn import Addresses
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool import Database
from app.fleet.errors import FleetError
from app.fleet.lifecycle import Phase
from app.fleet.settings import FleetSettings
from app.fleet.telemetry import logs
from app.fleet.telemetry.redaction import redact

# Beside the pool's: the link, and the place in the queue for leadership.
SESSIONS_OF_ITS_OWN = 2
ANNOUNCE_PATIENCE = 0.5

log = logs.events(__name__)


def sessions(settings: FleetSettings) -> int:
    """How many sessions of PostgreSQL an instance may open; behind a pooler, the pool's are the pooler's."""
    return SESSIONS_OF_ITS_OWN + (0 if settings.pooled else settings.pool_max)


LostHook = Callable[[Identity], Awaitable[None]]
# Called in the link's thread, after each heartbeat, with the link's session.
BeatHook = Callable[[Session, Identity], None]


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
        """`on_leave` is called when this instance is asked, or has, to drain and end."""
        super().__init__()
        self._addresses = addresses
        self._database = database
        self._on_leave = on_leave
        self._death_hooks: list[DeathHook] = []
        self._lost_hooks: list[LostHook] = []
        self._elected_hooks: list[Callable[[], None]] = []
        self._linked_hooks: list[Callable[[], None]] = []
        self._beat_hooks: list[BeatHook] = []
        self._listeners: dict[str, Callable[[str], None]] = {}
        self._running: Callable[[], int] = lambda: 0
        self._shutdown_record: list[dict[str, Any]] = []
        self._leave_timeout = 3.0
        self._last_id: int | None = None
        self._register = Register(namespace, self._death_hooks)
        self._loop: asyncio.AbstractEventLoop | None = None
        wanted = Registration(
            run_id=database.run_id,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            port=port,
            version=version,
            connections=sessions(settings),
            name=settings.instance_name,
            workspace=settings.workspace,
            workspace_shared=settings.workspace is not None and settings.workspace_force,
        )
        self._wanted = wanted
        callbacks = Callbacks(
            on_joined=self._joined,
            on_broken=self._broken,
            on_lost=self._lost,
            on_drain_requested=lambda reason: self._in_loop(self._on_leave, reason),
            on_refused=lambda error: self._in_loop(self._on_leave, str(error)),
            on_notification=lambda payload: self._in_loop(self._notified, payload),
            on_linked=self._linked,
            on_beat=self._beaten,
        )
        self._link = Link(addresses.direct, self._register, wanted, callbacks, running=self._count)
        database.compare_with(lambda: self._link.mark)
        self.on_linked(database.compare)
        self._reported_connection: float | None = None
        self.on_beat(self._report_connection)
        self._leader = Leader(addresses.direct, self._register, self._link, self._elected)

    # -- for the rooms above, before the start ------------------------------------------------------------------------

    def on_death(self, hook: DeathHook) -> None:
        self._death_hooks.append(hook)

    def on_lost(self, hook: LostHook) -> None:
        self._lost_hooks.append(hook)

    def on_elected(self, hook: Callable[[], None]) -> None:
        self._elected_hooks.append(hook)

    def on_linked(self, hook: Callable[[], None]) -> None:
        """Be told when the link is up, at first or again: notifications may have been lost."""
        self._linked_hooks.append(hook)

    def on_beat(self, hook: BeatHook) -> None:
        """Renew something with each heartbeat, in one statement and only if there is anything to renew."""
        self._beat_hooks.append(hook)

    def on_notification(self, kind: str, listener: Callable[[str], None]) -> None:
        """Hear the notifications `kind:rest`; the listener is given the rest."""
        self._listeners[kind] = listener

    def count_running(self, running: Callable[[], int]) -> None:
        """Say with each heartbeat how many runs there are here. Called in the link's thread."""
        self._running = running

    # -- for everyone -------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity | None:
        return self._link.identity

    @property
    def hostname(self) -> str:
        return self._wanted.hostname

    @property
    def pid(self) -> int:
        return self._wanted.pid

    @property
    def leading(self) -> bool:
        return self._leader.leading

    @property
    def terms(self) -> int:
        return self._leader.terms

    @property
    def link_figures(self) -> Figures:
        return self._link.figures

    def holds(self) -> bool:
        """Whether this instance may act as holder of anything right now (see `link.py`)."""
        return self._link.holds()

    async def instances(self) -> list[Instance]:
        return await list_instances(self._database)

    def in_loop(self, what: Callable[[], object]) -> None:
        """Have the event loop call it; for what the link's thread has to tell."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what)

    async def announce(self, phase: Phase) -> None:
        """Have the register say so; if the database is away, it will as soon as it can be told."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCE_PATIENCE):
                await asyncio.wrap_future(self._link.say(phase))

    def step_down(self) -> None:
        """Hand leadership over, for good: an instance that drains is no candidate any more."""
        self._leader.step_down()

    def keep_record(self, record: list[dict[str, Any]]) -> None:
        """Keep this list in the instance's row when it leaves."""
        self._shutdown_record = record

    async def write_final_record(self) -> None:
        """Write the record once more, on a session of its own, after everything else is closed."""
        if self._last_id is not None:
            await asyncio.to_thread(self._write_final_record, self._last_id)

    # -- the service --------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._link.join)
        except psycopg.Error as error:
            raise preflight.translate(error, self._addresses) from error
        if self._wanted.workspace_shared:
            log.warning("workspace.shared_by_force", workspace=self._wanted.workspace)
        self._leader.start()

    async def _stop(self) -> None:
        self._leader.step_down()
        await asyncio.to_thread(self._leader.join, 1.0)
        said = await asyncio.to_thread(self._link.leave, "left", self._shutdown_record, self._leave_timeout)
        if self._last_id is not None:
            log.info("instance.left", said=said)

    # -- told by the link's thread ------------------------------------------------------------------------------------

    def _joined(self, identity: Identity) -> None:
        self._last_id = identity.id
        logs.identify(instance=identity.name)

    def _broken(self, reason: str) -> None:
        self._in_loop(self._database.suspect, f"the link broke: {reason}")

    def _lost(self, lost: Identity) -> None:
        """Drop everything held under a lost identity, and wait for it; a blocked event loop is not waited for long."""
        if self._loop is None or not self._lost_hooks:
            return
        dropping: Future[None] = asyncio.run_coroutine_threadsafe(self._drop_all(lost), self._loop)
        try:
            dropping.result(DROP_PATIENCE)
        except TimeoutError:
            # What still runs is refused by token; waiting longer would only keep this instance away.
            log.warning("instance.drop_incomplete", id=lost.id, seconds=DROP_PATIENCE)

    async def _drop_all(self, lost: Identity) -> None:
        for hook in self._lost_hooks:
            await hook(lost)

    def _count(self) -> int:
        return self._running()

    def _beaten(self, session: Session, me: Identity) -> None:
        for hook in self._beat_hooks:
            hook(session, me)

    def _elected(self) -> None:
        self._call(self._elected_hooks)

    def _linked(self) -> None:
        self._call(self._linked_hooks)

    def _call(self, hooks: Sequence[Callable[[], None]]) -> None:
        for hook in hooks:
            self.in_loop(hook)

    def _notified(self, payload: str) -> None:
        kind, _, rest = payload.partition(":")
        if listener := self._listeners.get(kind):
            listener(rest)

    def _in_loop(self, what: Callable[[str], None], text: str) -> None:
        self.in_loop(partial(what, text))

    def _report_connection(self, session: Session, me: Identity) -> None:
        """Write that a connection of the pool has been out for too long, and once that none is any more."""
        seconds = self._database.connection_out_too_long()
        if seconds is not None or self._reported_connection is not None:
            self._register.report_connection(session, me, seconds)
        self._reported_connection = seconds

    def _write_final_record(self, identifier: int) -> None:
        try:
            application = f"flotilla/{self._register.namespace.name}/record"
            with open_session(self._addresses.direct, application=application) as session:
                self._register.write_shutdown(session, identifier, self._shutdown_record)
        except (psycopg.Error, FleetError) as error:
            # The log has every step; the row only lacks the last.
            log.info("shutdown.record_unwritten", reason=redact(str(error)))
