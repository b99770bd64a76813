"""The registry of instances: a row for each, and every change that is made to it (`registry_statements.py`).

An instance is live exactly as long as PostgreSQL holds its presence lock; its row describes it. The lock is taken
before the row is written, so a live row without its lock means that the link's session has ended: the process ended,
or its link broke and is about to reconnect. The leader waits long enough to tell these apart (`leader.py`), then calls
`declare_gone`. That transaction takes the instance's presence lock itself, so that a link that reconnects at this
moment waits for the transaction and then reads its result. Lock order: presence lock, then row.

    statement          guard                                        if the guard does not hold
    INSERT_INSTANCE    unique among live rows: name, workspace      NameTaken, WorkspaceTaken
    RELINK, HEARTBEAT  same run_id, state <> 'gone'                 no row: declared gone, the identity is lost
    declare_gone       presence lock free, state <> 'gone'          no change: it is live, or was declared gone before

Declaring a live instance gone is wasteful but not unsafe: that instance finds its row gone and joins again with another
id, and every write that it still makes for the old id is refused (`runs/__init__.py`).

The packages above register a `GoneHook` for what they must change when an instance is gone. It runs in the same
transaction, on its connection. That transaction must be short, because the leader's session waits for an answer only as
long as its patience. So a hook changes at most `BATCH` rows per call and returns whether more may be left. The leader
calls it again in later transactions until it returns false (`clean_up`). If the leader ends before that, or if it was
not the leader who declared the instance gone (it left, or another one wants its name), the periodic checks of those
packages find the remaining rows, which name a gone instance.

`declare_gone` does not wait for the instance's own transactions, which hold its row FOR KEY SHARE: it skips a locked
row, and the leader tries again. A transaction that never ends would keep the instance from ever being declared gone: if
a process freezes while it receives an answer larger than the socket's buffers, its backend waits for it, and no timeout
of PostgreSQL ends that wait. So if the row is locked, `declare_gone` ends the sessions of the instance's pool that hold
it (`END_POOL_SESSIONS`). It finds them by the instance's `run_id` (a UUID for each start) in their `application_name`
(`dsn.pool_application`). Sessions behind a pooler do not have that name; the pooler's own timeouts must end them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import psycopg
from psycopg.rows import TupleRow, class_row
from psycopg.types.json import Jsonb

from app.fleet.cluster import registry_statements as statements
from app.fleet.db.dsn import RUN_DIGITS, pool_application
from app.fleet.db.namespace import Lock, Namespace, Statement
from app.fleet.db.pool.pool import Database
from app.fleet.errors import InstanceUnknown, NameTaken, WorkspaceTaken
from app.fleet.role import Role
from app.fleet.telemetry.logs import event_log

Session: TypeAlias = psycopg.Connection[TupleRow]
# Called with the session of the transaction and the ids of the gone instances; returns whether rows are left.
GoneHook: TypeAlias = Callable[[Session, Sequence[int]], bool | None]
# The maximum number of rows that a hook changes per call.
BATCH = 1000

# A link whose backend was terminated reconnects within tens of milliseconds, before the instance is declared gone.
GRACE = 0.15
# After a restart or failover of PostgreSQL every presence lock is free, and the instances have this long to reconnect.
RELINK_GRACE = 3.0

log = event_log(__name__)


@dataclass(frozen=True)
class Registration:
    """An instance's own entry in the registry when it joins."""

    run_id: UUID
    hostname: str
    pid: int
    version: str
    connections: int
    role: Role = Role.ALL
    concurrency: int = 100
    name: str | None = None
    # The name before the last identity was lost. It is used again if it is free.
    former_name: str | None = None
    workspace: str | None = None
    workspace_shared: bool = False
    port: int | None = None


@dataclass(frozen=True)
class Identity:
    """Identifies an instance from joining to gone. After a lost identity it joins again with a new id."""

    id: int
    name: str
    run_id: UUID


class HeartbeatReply(NamedTuple):
    """The answer of the registry to a heartbeat."""

    drain_requested: bool
    drain_reason: str | None
    now: datetime


@dataclass(frozen=True)
class Instance:
    """A row of the registry, as `LIST` reads it."""

    id: int
    name: str
    run_id: UUID
    state: str
    role: str
    hostname: str
    pid: int
    port: int | None
    version: str
    workspace: str | None
    connections: int
    concurrency: int
    running: int
    started_at: datetime
    heartbeat_at: datetime
    heartbeat_age_ms: int
    server_started_at: datetime
    gone_at: datetime | None
    gone_reason: str | None
    shutdown: list[dict[str, Any]] | None
    # Seconds; null until the first heartbeat has compared the clocks.
    clock_ahead: float | None
    # Age of the oldest borrowed connection of its pool, if it is borrowed for too long.
    connection_out_seconds: float | None
    leader: bool

    @property
    def live(self) -> bool:
        return self.state != "gone"


class Registry:
    """The registry of one namespace. Each method runs on the session that it is given."""

    def __init__(self, namespace: Namespace, hooks: Sequence[GoneHook] = ()) -> None:
        self.namespace = namespace
        self._sql = namespace.sql
        self._hooks = hooks

    # -- this instance ------------------------------------------------------------------------------------------------

    def join(self, session: Session, registration: Registration, state: str) -> Identity:
        """Draw an id, take its presence lock, and only then write the row."""
        (identifier,) = self._one(session, statements.NEXT_ID)
        if not self.take_presence_lock(session, identifier):
            # Ids are never reused, so this happens only if a backup was restored under a live cluster.
            raise psycopg.OperationalError(f"another session holds the presence lock of the new id {identifier}")
        name = registration.name or registration.former_name or self._generate_name(session)
        while True:
            values = vars(registration) | {"id": identifier, "name": name, "state": state}
            try:
                session.execute(self._sql(statements.INSERT_INSTANCE), values)
            except psycopg.errors.UniqueViolation as error:
                if error.diag.constraint_name == "instances_workspace_living":
                    self._refuse_workspace(session, registration)
                elif error.diag.constraint_name != "instances_name_living":
                    # For example the id, if the sequence was reset: another name would not help.
                    raise
                elif registration.name is not None:
                    self._refuse_name(session, registration.name)
                else:
                    # Another instance was given the generated name explicitly.
                    name = self._generate_name(session)
                continue
            self.notify(session, f"joined:{identifier}")
            return Identity(identifier, name, registration.run_id)

    def take_presence_lock(self, session: Session, identifier: int) -> bool:
        (taken,) = self._one(session, statements.TAKE_PRESENCE_LOCK, key=Lock.PRESENCE.key(identifier))
        return bool(taken)

    def end_former_session(self, session: Session, identifier: int, backend_pid: int) -> None:
        session.execute(self._sql(statements.END_FORMER_SESSION), {"id": identifier, "pid": backend_pid})

    def relink(self, session: Session, me: Identity) -> bool:
        """Continue with the existing row; return false if it was declared gone."""
        return session.execute(self._sql(statements.RELINK), {"id": me.id, "run_id": me.run_id}).rowcount == 1

    def heartbeat(
        self, session: Session, me: Identity, state: str, running: int, clock_ahead: float | None = None
    ) -> HeartbeatReply | None:
        """Write the heartbeat; return None if this instance was declared gone."""
        values = {"id": me.id, "run_id": me.run_id, "state": state, "running": running, "ahead": clock_ahead}
        row = session.execute(self._sql(statements.HEARTBEAT), values).fetchone()
        return None if row is None else HeartbeatReply(*row)

    def report_connection(self, session: Session, me: Identity, seconds: float | None) -> None:
        """Write for how long a connection of the pool has been borrowed too long, or None if none is."""
        values = {"id": me.id, "run_id": me.run_id, "seconds": seconds}
        session.execute(self._sql(statements.REPORT_CONNECTION), values)

    def report_shutdown(self, session: Session, me: Identity, shutdown: list[dict[str, Any]]) -> None:
        """Write the steps of this instance's shutdown so far."""
        values = {"id": me.id, "run_id": me.run_id, "shutdown": Jsonb(shutdown)}
        session.execute(self._sql(statements.REPORT_SHUTDOWN), values)

    def leave(self, session: Session, identifier: int, reason: str, shutdown: list[dict[str, Any]]) -> None:
        """Declare this instance gone, unless another instance already did. The hooks are called here once."""
        values = {"id": identifier, "reason": reason, "shutdown": Jsonb(shutdown)}
        with session.transaction():
            session.execute(self._sql(statements.LOCK_ROW), {"id": identifier})
            if session.execute(self._sql(statements.LEAVE), values).rowcount != 1:
                return
            for hook in self._hooks:
                hook(session, [identifier])
            self.notify(session, f"gone:{identifier}")

    def write_shutdown(self, session: Session, identifier: int, shutdown: list[dict[str, Any]]) -> None:
        session.execute(self._sql(statements.WRITE_SHUTDOWN), {"id": identifier, "shutdown": Jsonb(shutdown)})

    # -- other instances ----------------------------------------------------------------------------------------------

    def unlinked(self, session: Session) -> dict[int, bool]:
        """Return the ids of live rows whose presence lock is free, and whether it was taken on the present server."""
        rows = session.execute(self._sql(statements.FIND_UNLINKED)).fetchall()
        return dict(rows)

    def unlinked_in_term(self, session: Session) -> dict[int, bool]:
        """Do the same in the leader's transaction, after its savepoint `term`, and keep no lock."""
        rows = session.execute(self._sql(statements.FIND_UNLINKED_IN_TERM)).fetchall()
        return dict(rows)

    def declare_gone(self, session: Session, identifier: int, reason: str) -> str | None:
        """Declare one instance gone and run the hooks in the same transaction; return its name if it was changed."""
        with session.transaction():
            (taken,) = self._one(session, statements.TRY_PRESENCE_LOCK, key=Lock.PRESENCE.key(identifier))
            if not taken:
                return None
            if session.execute(self._sql(statements.LOCK_ROW_UNLESS_LOCKED), {"id": identifier}).fetchone() is None:
                self._end_pool_sessions(session, identifier)
                return None
            row = session.execute(self._sql(statements.DECLARE_GONE), {"id": identifier, "reason": reason}).fetchone()
            assert row is not None
            session.execute(self._sql(statements.END_QUEUE_SESSION), {"id": identifier})
            for hook in self._hooks:
                hook(session, [identifier])
            self.notify(session, f"gone:{identifier}")
            return str(row[1])

    def clean_up(self, session: Session, identifier: int) -> bool:
        """Run the hooks once more for a gone instance; return whether rows are left."""
        with session.transaction():
            return True in {hook(session, [identifier]) for hook in self._hooks}

    def list(self, session: Session) -> list[Instance]:
        with session.cursor(row_factory=class_row(Instance)) as cursor:
            return cursor.execute(self._sql(statements.LIST)).fetchall()

    def is_gone(self, session: Session, identifier: int) -> bool:
        row = session.execute(self._sql(statements.FIND_STATE), {"id": identifier}).fetchone()
        return row is None or row[0] == "gone"

    def request_drain(self, session: Session, name: str, reason: str) -> int:
        """Ask an instance on any host to drain and leave. Its row has the request; the notification speeds it up."""
        row = session.execute(self._sql(statements.REQUEST_DRAIN), {"name": name, "reason": reason}).fetchone()
        if row is None:
            raise InstanceUnknown(f"there is no live instance named {name!r}: `flotilla list` shows the live instances")
        self.notify(session, f"drain:{row[0]}")
        return int(row[0])

    def record_term(self, identity: Identity, session: Session) -> None:
        session.execute(self._sql(statements.INSERT_TERM), {"id": identity.id, "name": identity.name})

    def prune(self, session: Session) -> int:
        session.execute(self._sql(statements.PRUNE_TERMS))
        return session.execute(self._sql(statements.PRUNE_INSTANCES)).rowcount

    def notify(self, session: Session, payload: str) -> None:
        session.execute(self._sql(statements.NOTIFY), {"payload": payload})

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _one(self, session: Session, statement: Statement, **values: Any) -> tuple[Any, ...]:
        row = session.execute(self._sql(statement), values or None).fetchone()
        assert row is not None
        return row

    def _end_pool_sessions(self, session: Session, identifier: int) -> None:
        """End the pool sessions that lock an instance's row. The caller holds its presence lock."""
        values = {"id": identifier, "pool": pool_application(self.namespace), "digits": RUN_DIGITS}
        for backend, ended in session.execute(self._sql(statements.END_POOL_SESSIONS), values):
            log.warning("instance.session_ended", id=identifier, backend=backend, ended=ended)

    def _generate_name(self, session: Session) -> str:
        (number,) = self._one(session, statements.NEXT_NUMBER)
        suffix = f"-{number}"
        return self.namespace.name[: 63 - len(suffix)] + suffix

    def _live_owner(self, session: Session, statement: Statement, value: str) -> str | None:
        """Describe the live owner of a name or workspace; None if there is none."""
        row = session.execute(self._sql(statement), {"value": value}).fetchone()
        if row is None or self._gone_after_grace(session, int(row[0])):
            return None
        (identifier,) = row
        name, hostname, pid, started_at = self._one(session, statements.FIND_OWNER, id=identifier)
        return f"{name} (id {identifier}, pid {pid} on {hostname}, since {started_at:%Y-%m-%d %H:%M:%S %Z})"

    def _gone_after_grace(self, session: Session, identifier: int) -> bool:
        """Declare an owner gone whose process ended while there was no leader; return false if it is live."""
        if identifier not in self.unlinked(session):
            # A process that has just been killed still holds its lock for some milliseconds.
            time.sleep(GRACE)
        same_server = self.unlinked(session).get(identifier)
        if same_server is None:
            return self.is_gone(session, identifier)
        deadline = time.monotonic() + (GRACE if same_server else RELINK_GRACE)
        while time.monotonic() < deadline:
            time.sleep(GRACE / 3)
            if identifier not in self.unlinked(session):
                return self.is_gone(session, identifier)
        self.declare_gone(session, identifier, "its session ended")
        return self.is_gone(session, identifier)

    def _refuse_name(self, session: Session, name: str) -> None:
        if owner := self._live_owner(session, statements.FIND_NAME, name):
            raise NameTaken(
                f"a live instance is already named {name!r}: {owner}. Choose another FLOTILLA_INSTANCE_NAME, leave it "
                f"unset to get a generated name, or stop that instance first with `flotilla down {name}`"
            )

    def _refuse_workspace(self, session: Session, registration: Registration) -> None:
        assert registration.workspace is not None
        if owner := self._live_owner(session, statements.FIND_WORKSPACE, registration.workspace):
            raise WorkspaceTaken(
                f"the workspace {registration.workspace!r} is in use by {owner}. Stop that instance first "
                f"(`flotilla down`), choose another FLOTILLA_WORKSPACE, or share it with --force if that is safe"
            )


async def list_instances(database: Database) -> list[Instance]:
    """Read the registry through the pool."""
    async with database.autocommit() as connection, connection.cursor(row_factory=class_row(Instance)) as cursor:
        await cursor.execute(database.namespace.sql(statements.LIST))
        return await cursor.fetchall()
