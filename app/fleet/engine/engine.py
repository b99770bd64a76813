"""The engine of one instance: its actions, and the services that schedule, claim, run and watch over runs.

Wired here, and nowhere else: who is told what. Notifications come in as `kind:rest`:

    runs:…                          runs wait at these places (`runs/notifications.py`)
    cancel:run                      a running run is to be cancelled
    slots                           a schedule was changed or resumed
    members                         an instance is ready: many places are shared out with it from now on
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import psycopg

from app.fleet.background import Service
from app.fleet.cluster.member import Member
from app.fleet.coordination import coordination
from app.fleet.coordination.coordination import Coordination
from app.fleet.db.namespace import Statement
from app.fleet.db.pool import Database
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.synchronise import announce, synchronise
from app.fleet.engine.dispatch.claim import LATER, Told
from app.fleet.engine.dispatch.scheduler import Scheduler
from app.fleet.engine.enqueue.trigger import Triggers, current
from app.fleet.engine.execute.executor import Executor
from app.fleet.engine.maintenance import rescuer
from app.fleet.engine.maintenance.pruner import Pruner
from app.fleet.engine.maintenance.reconciler import Reconciler
from app.fleet.engine.once import once
from app.fleet.engine.once.block import SeenStore
from app.fleet.engine.once.housekeeping import find_pending_too_long
from app.fleet.errors import DatabaseError
from app.fleet.lifecycle import Lifecycle
from app.fleet.runs import feed
from app.fleet.runs.notifications import parse_notification
from app.fleet.settings import FleetSettings
from app.fleet.stream.stream import Stream

# How often a start tries to write its actions, if the server ends its transaction for another one.
SYNCHRONISE_TRIES = 5

MEMBERS = Statement("SELECT pg_notify('{channel}', 'members:')")


class Engine:
    def __init__(
        self,
        settings: FleetSettings,
        database: Database,
        member: Member,
        catalogue: Catalogue,
        lifecycle: Lifecycle,
        stream: Stream,
        shared: Coordination,
    ) -> None:
        self.catalogue = catalogue
        self.triggers = Triggers(database, catalogue, stream.hub)
        self.executor = Executor(settings, database, member, catalogue, lifecycle, stream.relay)
        self.scheduler = Scheduler(
            database, member, catalogue, lifecycle, self.executor.claimant.clock, self.executor.pause_claiming
        )
        self.reconciler = Reconciler(database, member, catalogue, self.executor, self.scheduler.expect)
        self.pruner = Pruner(database, member)
        self.seen = SeenStore(database, member)
        self._database = database
        self._member = member
        self._hub = stream.hub
        self._shared = shared
        self._feed_retention = timedelta(seconds=settings.feed_retention)
        member.on_gone(rescuer.Rescue(database.namespace))
        shared.anomalies.add(rescuer.stuck)
        shared.anomalies.add(find_pending_too_long)
        member.on_identity_lost(self.executor.drop)
        member.on_elected(self._elected)
        member.on_notification("runs", self._runs_wait)
        member.on_notification("cancel", lambda run: self.executor.cancel(int(run)))
        member.on_notification("slots", lambda _: self.scheduler.look_now())
        member.on_notification("members", lambda _: self.reconciler.look_now())
        member.count_running(lambda: len(self.executor.running_runs))

    @property
    def services(self) -> Sequence[Service]:
        """In the order in which they start."""
        return (self.executor, self.reconciler, self.pruner, self.scheduler)

    async def synchronise(self) -> None:
        """Write the actions of this code into the database, before anything looks for them."""
        for left in reversed(range(SYNCHRONISE_TRIES)):
            try:
                await self._synchronise()
                break
            except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
                # The server ended this transaction so that another one can go on; nothing was written.
                if left == 0:
                    raise
        # Tasks started from here on know whose actions `trigger` means.
        self.enter()

    async def _synchronise(self) -> None:
        async with self._database.connection() as connection:
            await synchronise(connection, self._database.namespace, self.catalogue)
            await feed.set_retention(connection, self._database.namespace, self._feed_retention)
            # Now and not at the reconciler's first look: an instance that is ready stands by.
            if (me := self._member.identity) is not None:
                await announce(connection, self._database.namespace, me.id, self.catalogue.ids)

    def enter(self) -> None:
        """Have the public functions mean this instance, in this task and those that it starts."""
        current.set(self.triggers)
        once.current.set(self.seen)
        coordination.current.set(self._shared)

    async def tell_members(self) -> None:
        """Have everyone look who is there; without it they find out within two seconds."""
        with suppress(psycopg.Error, DatabaseError):
            async with self._database.autocommit() as connection:
                await connection.execute(self._database.namespace.sql(MEMBERS))

    async def pause(self) -> None:
        """Stop the executor; the reconciler goes on until then, because it sees what is to be cancelled."""
        await self.pruner.stop()
        await self.executor.stop()
        await self.reconciler.stop()

    def _elected(self) -> None:
        self.scheduler.look_now()
        self.reconciler.look_now()

    def _runs_wait(self, rest: str) -> None:
        places = list(parse_notification(rest))
        others = self.executor.claimant.backlog.tell_all(places, self.executor.now())
        self.executor.wake()
        if others:
            asyncio.get_running_loop().call_later(LATER, self._still_wait, others)
        # Some of them may wait again.
        self._hub.on_pending(action_id for action_id, _, _ in places)

    def _still_wait(self, places: Sequence[Told]) -> None:
        """Look at the others' parts too: whoever they belong to may be busy, or gone."""
        for place in places:
            self.executor.claimant.backlog.tell(*place, self.executor.now())
        self.executor.wake()
