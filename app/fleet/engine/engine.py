"""The engine of one instance: its actions, and the services that schedule, claim, execute and look after runs.

Everything is wired here, and nowhere else. Notifications have the form `kind:rest`; those of the engine are:

    runs:…          runs wait in these queues (`runs/effects/notifications.py`)
    returned:…      the same, of runs that an instance has returned because it leaves; with its release
    cancel:run      the cancellation of this running run was requested
    slots           a schedule was changed, or an action was resumed
    members         another instance is ready: it shares many queues from now on
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
from app.fleet.db.pool.pool import Database
from app.fleet.db.server_clock import ServerClock
from app.fleet.engine.actions import creator
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.synchronise import announce, synchronise
from app.fleet.engine.dispatch.backlog import OTHERS_DELAY, Backlog, Waiting
from app.fleet.engine.dispatch.claimant import Claimant
from app.fleet.engine.dispatch.dispatcher import Dispatcher
from app.fleet.engine.dispatch.scheduler import BACK_UP, WEB_BACK_UP, Scheduler
from app.fleet.engine.enqueue.trigger import Triggers
from app.fleet.engine.execute.attempt import Attempt
from app.fleet.engine.execute.executor import Executor
from app.fleet.engine.figures.cluster_figures import ClusterFigures
from app.fleet.engine.figures.run_metrics import RunMetrics
from app.fleet.engine.figures.run_minutes import RunMinutes
from app.fleet.engine.maintenance import no_worker, rescuer
from app.fleet.engine.maintenance.pruner import Pruner
from app.fleet.engine.maintenance.reconciler import Reconciler
from app.fleet.engine.once import once
from app.fleet.engine.once.block import SeenStore
from app.fleet.engine.once.housekeeping import find_pending_too_long
from app.fleet.errors import DatabaseError
from app.fleet.lifecycle import Lifecycle
from app.fleet.runs.effects import feed
from app.fleet.runs.effects.notifications import parse_notification, release_mark
from app.fleet.settings import FleetSettings
from app.fleet.stream.stream import Stream

# How often a start tries to write its actions, if PostgreSQL ends its transaction for another one.
SYNCHRONISE_TRIES = 5

# How long an instance leaves runs that another instance of its release has returned to a different release. Then it
# claims them itself: the instances of that release may have no free slot, or not have the action.
RELEASE_DELAY = 1.0

NOTIFY_MEMBERS = Statement("SELECT pg_notify('{channel}', 'members:')")


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
        self.clock = ServerClock()
        self.backlog = Backlog(catalogue, self.clock)
        self.claimant = Claimant(database.namespace, catalogue, self.backlog, self.clock)
        self.triggers = Triggers(database, catalogue, stream.hub)
        self.minutes = RunMinutes(database, member, self.clock)
        self.metrics = RunMetrics(catalogue, self.minutes.counts)
        self.figures = ClusterFigures(database, member, shared.anomalies)
        version = member.registration.version
        self.executor = Executor(settings, database, catalogue, stream.relay, self.metrics, self._on_settled, version)
        self.dispatcher = Dispatcher(
            database,
            member,
            lifecycle,
            stream.relay,
            self.executor,
            self.backlog,
            self.claimant,
            self.clock,
            self.metrics,
        )
        self.scheduler = Scheduler(
            database,
            member,
            catalogue,
            lifecycle,
            self.clock,
            self.dispatcher.pause_claiming,
            back_up=BACK_UP if settings.role.executes else WEB_BACK_UP,
        )
        self.reconciler = Reconciler(
            database,
            member,
            catalogue,
            self.executor,
            self.dispatcher,
            self.claimant,
            self.backlog,
            self.clock,
            self.scheduler.expect,
        )
        self.pruner = Pruner(database, member)
        self.seen = SeenStore(database, member)
        self._database = database
        self._member = member
        self._hub = stream.hub
        self._shared = shared
        self._role = settings.role
        self._release_mark = release_mark(version)
        self._feed_retention = timedelta(seconds=settings.feed_retention)
        member.on_gone(rescuer.Rescue(database.namespace))
        shared.anomalies.add(rescuer.stuck)
        shared.anomalies.add(no_worker.check)
        shared.anomalies.add(find_pending_too_long)
        member.on_identity_lost(self.executor.drop)
        member.on_elected(self._elected)
        member.on_notification("runs", self._runs_wait)
        member.on_notification("returned", self._runs_returned)
        member.on_notification("cancel", lambda run: self.executor.cancel(int(run)))
        member.on_notification("slots", lambda _: self.scheduler.schedule_now())
        member.on_notification("members", lambda _: self.reconciler.read_now())
        member.count_running(lambda: len(self.executor.attempts))

    @property
    def services(self) -> Sequence[Service]:
        """In the order in which they start. Without the dispatcher, the instance claims no run."""
        claims = (self.dispatcher,) if self._role.executes else ()
        return (self.executor, *claims, self.reconciler, self.pruner, self.minutes, self.scheduler)

    async def synchronise(self) -> None:
        """Write the actions of this code to the database, before any service reads them."""
        for left in reversed(range(SYNCHRONISE_TRIES)):
            try:
                await self._synchronise()
                break
            except (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure):
                # PostgreSQL ended this transaction so that another one can go on; nothing was written.
                if left == 0:
                    raise
        # In tasks that start from here on, `trigger` means the actions of this instance.
        self.enter()

    async def _synchronise(self) -> None:
        async with self._database.connection() as connection:
            await synchronise(connection, self._database.namespace, self.catalogue)
            await feed.set_retention(connection, self._database.namespace, self._feed_retention)
            # Before the reconciler's first read: an instance that is ready stands by for its actions.
            if (me := self._member.identity) is not None:
                await announce(connection, self._database.namespace, me.id, self.catalogue.ids)

    def enter(self) -> None:
        """Make the public functions mean this instance, in this task and in the tasks that it starts."""
        creator.current.set(self.triggers)
        once.current.set(self.seen)
        coordination.current.set(self._shared)

    async def notify_members(self) -> None:
        """Make the other instances count this one. If the notification is lost, they do so within two seconds."""
        with suppress(psycopg.Error, DatabaseError):
            async with self._database.autocommit() as connection:
                await connection.execute(self._database.namespace.sql(NOTIFY_MEMBERS))

    async def pause(self) -> None:
        """Stop claiming and executing. The reconciler goes on until then: it finds requests to cancel runs."""
        await self.pruner.stop()
        await self.dispatcher.stop()
        await self.executor.stop()
        await self.reconciler.stop()

    def _on_settled(self, attempts: Sequence[Attempt]) -> None:
        self.dispatcher.on_settled(attempts)

    def _elected(self) -> None:
        self.scheduler.schedule_now()
        self.reconciler.read_now()

    def _runs_wait(self, rest: str) -> None:
        waiting = list(parse_notification(rest))
        loop = asyncio.get_running_loop()
        others = self.backlog.add_all(waiting, loop.time())
        self.dispatcher.wake()
        if others:
            loop.call_later(OTHERS_DELAY, self._still_wait, others)
        # Finished runs among them were retried.
        self._hub.on_pending(action_id for action_id, _, _ in waiting)

    def _runs_returned(self, rest: str) -> None:
        """Runs of an instance that leaves. In a deploy, all instances of its release leave soon: prefer the others."""
        mark, _, queues = rest.partition(":")
        if mark == self._release_mark and self.reconciler.another_release:
            asyncio.get_running_loop().call_later(RELEASE_DELAY, self._runs_wait, queues)
        else:
            self._runs_wait(queues)

    def _still_wait(self, waiting: Sequence[Waiting]) -> None:
        """Claim from the queues of the other parts too: the instances that they belong to may be busy, or gone."""
        now = asyncio.get_running_loop().time()
        for each in waiting:
            self.backlog.add(*each, now)
        self.dispatcher.wake()
