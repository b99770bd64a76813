"""The register of instances: a row each, and the statements that may change one.

An instance is alive exactly as long as PostgreSQL holds its presence lock; the row says everything else. The lock is
taken before the row is written, so a living row without its lock means that the session ended: by death, or because
the link broke and is about to be taken up again. Who decides which is the leader (`leader.py`); the verdict is
`declare_gone`, and it is a transaction that holds the dead one's presence lock while it decides, so that a link that
comes back in that very moment waits for the verdict and then reads it. Lock order: presence lock, then row.

    statement        guard                                       if the guard does not hold
    INSERT_INSTANCE  unique among the living: name, workspace    NameTaken, WorkspaceTaken
    RELINK, BEAT     same run_id, state <> 'gone'                zero rows: declared gone, the identity is lost
    declare_gone     presence lock free, state <> 'gone'         nothing happens: it lives, or was declared already

A verdict that was wrong is never unsafe, only wasteful: the declared instance finds its row gone and starts anew under
another id, and whatever it still writes for the old one is refused by token.

Rooms above register what must happen in the transaction of a death (`DeathHook`): their statements run on its
connection, and with it they commit or not at all. The transaction must be short, because whoever writes it gives up
after its patience. So a hook changes at most `BATCH` rows in one call and returns whether more are left; for those it
is called again after the verdict, in transactions of their own (`clean_up`). If nobody gets to that, the periodic
checks of each room find the rest: a row that names a gone instance is enough.

The verdict does not wait for the instance's own transactions, which hold its row FOR KEY SHARE: it skips the row, and
the leader tries again. A transaction that never ends would keep it away for ever: a process that was frozen while it
received an answer larger than the socket's buffers has a backend that waits for it, and no timeout of PostgreSQL ends
that one. So a verdict that finds the row locked ends the sessions of this instance's own pool that hold it
(`END_HOLDERS`). They are found by the start's run id in their `application_name` (`dsn.pool_application`); behind a
pooler they have no such name, and the pooler's own timeouts must end them.
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

from app.fleet.db.dsn import RUN_DIGITS, pool_application
from app.fleet.db.namespace import Lock, Namespace, Statement
from app.fleet.db.pool import Database
from app.fleet.errors import InstanceUnknown, NameTaken, WorkspaceTaken
from app.fleet.telemetry.logs import events

Session: TypeAlias = psycopg.Connection[TupleRow]
# Called with the connection of the death's transaction and the ids of the dead; returns whether rows are left over.
DeathHook: TypeAlias = Callable[[Session, Sequence[int]], bool | None]
# How many rows a hook changes in one call.
BATCH = 1000

log = events(__name__)

# A terminated backend is linked again in tens of milliseconds: a lock that is free for less than this is no death.
GRACE = 0.15
# After a restart or a failover every lock is free at once; this long the others have to take theirs again.
RELINK_GRACE = 3.0

DRAW_ID = Statement("SELECT nextval('{schema}.instance_ids')")
DRAW_NUMBER = Statement("SELECT nextval('{schema}.instance_numbers')")
TAKE_PRESENCE = Statement("SELECT pg_try_advisory_lock({class}, %(key)s)")

INSERT_INSTANCE = Statement("""
INSERT INTO {schema}.instances (
    id, name, run_id, state, hostname, pid, port, version, workspace, workspace_shared, connections,
    started_at, heartbeat_at, server_started_at
) VALUES (
    %(id)s, %(name)s, %(run_id)s, %(state)s, %(hostname)s, %(pid)s, %(port)s, %(version)s, %(workspace)s,
    %(workspace_shared)s, %(connections)s, clock_timestamp(), clock_timestamp(), pg_postmaster_start_time()
)
""")

RELINK = Statement("""
UPDATE {schema}.instances
SET heartbeat_at = clock_timestamp(), server_started_at = pg_postmaster_start_time()
WHERE id = %(id)s AND run_id = %(run_id)s AND state <> 'gone'
""")

# Ends the session that still holds our presence after its network broke. Only a session of our own id can hold it,
# and the pid we remember must still be that session.
END_FORMER_SESSION = Statement("""
SELECT pg_terminate_backend(l.pid)
FROM pg_catalog.pg_locks AS l
WHERE l.locktype = 'advisory' AND l.granted AND l.pid = %(pid)s
  AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
  AND l.classid = '{channel}'::regnamespace AND l.objid = %(id)s::int::oid AND l.objsubid = 2
""")

BEAT = Statement("""
UPDATE {schema}.instances
SET heartbeat_at = clock_timestamp(), state = %(state)s, running = %(running)s, clock_ahead = %(ahead)s
WHERE id = %(id)s AND run_id = %(run_id)s AND state <> 'gone'
RETURNING drain_requested_at IS NOT NULL, drain_reason, clock_timestamp()
""")

REPORT_CONNECTION = Statement("""
UPDATE {schema}.instances
SET connection_out_seconds = %(seconds)s
WHERE id = %(id)s AND run_id = %(run_id)s AND state <> 'gone'
""")

LEAVE = Statement("""
UPDATE {schema}.instances
SET state = 'gone', gone_at = clock_timestamp(), gone_reason = %(reason)s, running = 0, shutdown = %(shutdown)s
WHERE id = %(id)s AND state <> 'gone'
""")

WRITE_SHUTDOWN = Statement("UPDATE {schema}.instances SET shutdown = %(shutdown)s WHERE id = %(id)s")

# The rows that are visible were locked before they were written, so a missing lock means a session that ended.
SILENT = Statement("""
SELECT i.id, i.server_started_at = pg_postmaster_start_time() AS same_server
FROM {schema}.instances AS i
WHERE i.state <> 'gone'
  AND NOT EXISTS (
      SELECT FROM pg_catalog.pg_locks AS l
      WHERE l.locktype = 'advisory' AND l.granted
        AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
        AND l.classid = '{channel}'::regnamespace AND l.objid = i.id::oid AND l.objsubid = 2
  )
""")

HOLD_PRESENCE = Statement("SELECT pg_try_advisory_xact_lock({class}, %(key)s)")

# Before a row is declared gone. A claim holds the row of its instance FOR KEY SHARE until it is committed: an instance
# that leaves waits for its own claims, and a verdict skips the row while one is under way.
LOCK_ROW = Statement("SELECT id FROM {schema}.instances WHERE id = %(id)s AND state <> 'gone' FOR UPDATE")
LOCK_ROW_UNLESS_LOCKED = Statement(f"{LOCK_ROW} SKIP LOCKED")

# The sessions of this instance's pool whose transaction has locked a row of the register: RowShareLock is what
# SELECT … FOR KEY SHARE takes on the table, and it is kept until the transaction ends.
END_HOLDERS = Statement("""
SELECT a.pid, pg_terminate_backend(a.pid)
FROM {schema}.instances AS i
JOIN pg_catalog.pg_stat_activity AS a
  ON a.application_name = %(pool)s || left(replace(i.run_id::text, '-', ''), %(digits)s)
 AND a.datname = current_database() AND a.usename = current_user
WHERE i.id = %(id)s AND i.state <> 'gone'
  AND EXISTS (
      SELECT FROM pg_catalog.pg_locks AS l
      WHERE l.pid = a.pid AND l.locktype = 'relation' AND l.granted AND l.mode = 'RowShareLock'
        AND l.relation = '{schema}.instances'::regclass
        AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
  )
""")

DECLARE_GONE = Statement("""
UPDATE {schema}.instances
SET state = 'gone', gone_at = clock_timestamp(), gone_reason = %(reason)s, running = 0
WHERE id = %(id)s AND state <> 'gone'
RETURNING id, name
""")

# A frozen one still stands in the queue for leadership, where its turn would come and nobody would take it.
LEAVE_QUEUE = Statement("""
SELECT pg_terminate_backend(l.pid)
FROM {schema}.instances AS i
JOIN pg_catalog.pg_locks AS l ON l.pid = i.turn_pid
WHERE i.id = %(id)s
  AND l.locktype = 'relation' AND l.relation = '{schema}.leader_turn'::regclass
  AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
""")

NOTIFY = Statement("SELECT pg_notify('{channel}', %(payload)s)")

# The leader is whoever holds the queue's lock, so there is never more than one and it is never out of date.
LIST = Statement("""
SELECT i.id, i.name, i.run_id, i.state, i.hostname, i.pid, i.port, i.version, i.workspace, i.connections, i.running,
       i.started_at, i.gone_at, i.gone_reason, i.shutdown, i.server_started_at,
       (extract(epoch FROM clock_timestamp() - i.heartbeat_at) * 1000)::int8 AS heartbeat_age_ms,
       i.heartbeat_at, i.clock_ahead, i.connection_out_seconds,
       i.state <> 'gone' AND EXISTS (
           SELECT FROM pg_catalog.pg_locks AS l
           WHERE l.locktype = 'relation' AND l.granted AND l.mode = 'ExclusiveLock' AND l.pid = i.turn_pid
             AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
             AND l.relation = to_regclass('{schema}.leader_turn')
       ) AS leader
FROM {schema}.instances AS i
WHERE i.state <> 'gone' OR i.gone_at > clock_timestamp() - interval '10 minutes'
ORDER BY i.id
""")

FIND_NAME = Statement("SELECT id FROM {schema}.instances WHERE name = %(value)s AND state <> 'gone'")
FIND_WORKSPACE = Statement("SELECT id FROM {schema}.instances WHERE workspace = %(value)s AND state <> 'gone'")
FIND_OWNER = Statement("""
SELECT name, hostname, pid, started_at FROM {schema}.instances WHERE id = %(id)s
""")

STATE = Statement("SELECT state FROM {schema}.instances WHERE id = %(id)s")

REQUEST_DRAIN = Statement("""
UPDATE {schema}.instances
SET drain_requested_at = coalesce(drain_requested_at, clock_timestamp()), drain_reason = %(reason)s
WHERE name = %(name)s AND state <> 'gone'
RETURNING id
""")

BEGIN_TERM = Statement("INSERT INTO {schema}.leader_terms (instance_id, instance) VALUES (%(id)s, %(name)s)")

FORGET_TERMS = Statement("DELETE FROM {schema}.leader_terms WHERE began_at < clock_timestamp() - interval '7 days'")

# The gone stay visible for ten minutes (above), and findable for a week. A small batch, so that it holds up nobody.
PRUNE = Statement("""
DELETE FROM {schema}.instances
WHERE id IN (
    SELECT id FROM {schema}.instances
    WHERE state = 'gone' AND gone_at < clock_timestamp() - interval '7 days'
    ORDER BY id
    LIMIT 500
    FOR UPDATE SKIP LOCKED
)
""")


@dataclass(frozen=True)
class Registration:
    """What an instance says about itself when it joins."""

    run_id: UUID
    hostname: str
    pid: int
    version: str
    connections: int
    name: str | None = None
    # The name before the last identity was lost: taken again if it is free.
    former_name: str | None = None
    workspace: str | None = None
    workspace_shared: bool = False
    port: int | None = None


@dataclass(frozen=True)
class Identity:
    """Who an instance is. A lost identity never comes back: the next one has another id."""

    id: int
    name: str
    run_id: UUID


class Answered(NamedTuple):
    """What a heartbeat is answered with."""

    asked_to_leave: bool
    reason: str | None
    now: datetime


@dataclass(frozen=True)
class Instance:
    """A row of the register, as others see it."""

    id: int
    name: str
    run_id: UUID
    state: str
    hostname: str
    pid: int
    port: int | None
    version: str
    workspace: str | None
    connections: int
    running: int
    started_at: datetime
    heartbeat_at: datetime
    heartbeat_age_ms: int
    server_started_at: datetime
    gone_at: datetime | None
    gone_reason: str | None
    shutdown: list[dict[str, Any]] | None
    # Seconds; null until it has compared them.
    clock_ahead: float | None
    # How long a connection of its pool has been out, if that is too long.
    connection_out_seconds: float | None
    leader: bool

    @property
    def living(self) -> bool:
        return self.state != "gone"


class Register:
    """The register of one namespace, through whatever session it is given."""

    def __init__(self, namespace: Namespace, hooks: Sequence[DeathHook] = ()) -> None:
        self.namespace = namespace
        self._sql = namespace.sql
        self._hooks = hooks

    # -- joining and staying ------------------------------------------------------------------------------------------

    def join(self, session: Session, wanted: Registration, state: str) -> Identity:
        """Draw an id, take its presence lock, and only then write the row."""
        (identifier,) = self._one(session, DRAW_ID)
        if not self.take_presence(session, identifier):
            # Ids are never reused, so only a restored backup under a living cluster gets here.
            raise psycopg.OperationalError(f"presence of the new id {identifier} is held by another session")
        name = wanted.name or wanted.former_name or self._draw_name(session)
        while True:
            values = vars(wanted) | {"id": identifier, "name": name, "state": state}
            try:
                session.execute(self._sql(INSERT_INSTANCE), values)
            except psycopg.errors.UniqueViolation as error:
                if error.diag.constraint_name == "instances_workspace_living":
                    self._refuse_workspace(session, wanted)
                elif error.diag.constraint_name != "instances_name_living":
                    # The id, for example, if the sequence was reset: another name would not help.
                    raise
                elif wanted.name is not None:
                    self._refuse_name(session, wanted.name)
                else:
                    # Someone chose, by hand, the name this number makes.
                    name = self._draw_name(session)
                continue
            self.notify(session, f"joined:{identifier}")
            return Identity(identifier, name, wanted.run_id)

    def take_presence(self, session: Session, identifier: int) -> bool:
        (taken,) = self._one(session, TAKE_PRESENCE, key=Lock.PRESENCE.key(identifier))
        return bool(taken)

    def end_former_session(self, session: Session, identifier: int, backend_pid: int) -> None:
        session.execute(self._sql(END_FORMER_SESSION), {"id": identifier, "pid": backend_pid})

    def relink(self, session: Session, me: Identity) -> bool:
        """Take the row up again; false if it was declared gone meanwhile."""
        return session.execute(self._sql(RELINK), {"id": me.id, "run_id": me.run_id}).rowcount == 1

    def beat(
        self, session: Session, me: Identity, state: str, running: int, ahead: float | None = None
    ) -> Answered | None:
        """Say that we live; None if we were declared gone."""
        values = {"id": me.id, "run_id": me.run_id, "state": state, "running": running, "ahead": ahead}
        row = session.execute(self._sql(BEAT), values).fetchone()
        return None if row is None else Answered(*row)

    def report_connection(self, session: Session, me: Identity, seconds: float | None) -> None:
        """Write how long a connection of our pool has been out, or that none has been for too long."""
        values = {"id": me.id, "run_id": me.run_id, "seconds": seconds}
        session.execute(self._sql(REPORT_CONNECTION), values)

    def leave(self, session: Session, identifier: int, reason: str, shutdown: list[dict[str, Any]]) -> None:
        """Declare ourselves gone, unless somebody has; what a death asks for happens once, whoever is first."""
        values = {"id": identifier, "reason": reason, "shutdown": Jsonb(shutdown)}
        with session.transaction():
            session.execute(self._sql(LOCK_ROW), {"id": identifier})
            if session.execute(self._sql(LEAVE), values).rowcount != 1:
                return
            for hook in self._hooks:
                hook(session, [identifier])
            self.notify(session, f"gone:{identifier}")

    def write_shutdown(self, session: Session, identifier: int, shutdown: list[dict[str, Any]]) -> None:
        session.execute(self._sql(WRITE_SHUTDOWN), {"id": identifier, "shutdown": Jsonb(shutdown)})

    # -- seeing and judging others ------------------------------------------------------------------------------------

    def silent(self, session: Session) -> dict[int, bool]:
        """Return the living whose presence lock is free, and whether it was taken on this very server."""
        rows = session.execute(self._sql(SILENT)).fetchall()
        return dict(rows)

    def declare_gone(self, session: Session, identifier: int, reason: str) -> str | None:
        """Declare one instance gone and do in the same transaction what its death asks for. Returns its name."""
        with session.transaction():
            (held,) = self._one(session, HOLD_PRESENCE, key=Lock.PRESENCE.key(identifier))
            if not held:
                return None
            if session.execute(self._sql(LOCK_ROW_UNLESS_LOCKED), {"id": identifier}).fetchone() is None:
                self._end_holders(session, identifier)
                return None
            row = session.execute(self._sql(DECLARE_GONE), {"id": identifier, "reason": reason}).fetchone()
            assert row is not None
            session.execute(self._sql(LEAVE_QUEUE), {"id": identifier})
            for hook in self._hooks:
                hook(session, [identifier])
            self.notify(session, f"gone:{identifier}")
            return str(row[1])

    def clean_up(self, session: Session, identifier: int) -> bool:
        """Do another batch of what the death of a gone instance asks for; return whether more is left."""
        with session.transaction():
            return True in {hook(session, [identifier]) for hook in self._hooks}

    def list(self, session: Session) -> list[Instance]:
        with session.cursor(row_factory=class_row(Instance)) as cursor:
            return cursor.execute(self._sql(LIST)).fetchall()

    def is_gone(self, session: Session, identifier: int) -> bool:
        row = session.execute(self._sql(STATE), {"id": identifier}).fetchone()
        return row is None or row[0] == "gone"

    def request_drain(self, session: Session, name: str, reason: str) -> int:
        """Ask an instance, wherever it runs, to drain and leave. The row asks; the notification makes it quick."""
        row = session.execute(self._sql(REQUEST_DRAIN), {"name": name, "reason": reason}).fetchone()
        if row is None:
            raise InstanceUnknown(f"no living instance is called {name!r}: `flotilla list` shows those there are")
        self.notify(session, f"drain:{row[0]}")
        return int(row[0])

    def begin_term(self, identity: Identity, session: Session) -> None:
        session.execute(self._sql(BEGIN_TERM), {"id": identity.id, "name": identity.name})

    def prune(self, session: Session) -> int:
        session.execute(self._sql(FORGET_TERMS))
        return session.execute(self._sql(PRUNE)).rowcount

    def notify(self, session: Session, payload: str) -> None:
        session.execute(self._sql(NOTIFY), {"payload": payload})

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _one(self, session: Session, statement: Statement, **values: Any) -> tuple[Any, ...]:
        row = session.execute(self._sql(statement), values or None).fetchone()
        assert row is not None
        return row

    def _end_holders(self, session: Session, identifier: int) -> None:
        """End the sessions that keep an instance from being declared gone. The caller holds its presence lock."""
        values = {"id": identifier, "pool": pool_application(self.namespace), "digits": RUN_DIGITS}
        for backend, ended in session.execute(self._sql(END_HOLDERS), values):
            log.warning("instance.session_ended", id=identifier, backend=backend, ended=ended)

    def _draw_name(self, session: Session) -> str:
        (number,) = self._one(session, DRAW_NUMBER)
        suffix = f"-{number}"
        return self.namespace.name[: 63 - len(suffix)] + suffix

    def _living(self, session: Session, statement: Statement, value: str) -> int | None:
        row = session.execute(self._sql(statement), {"value": value}).fetchone()
        return None if row is None else int(row[0])

    def _living_owner(self, session: Session, statement: Statement, value: str) -> str | None:
        """Name the holder of a name or workspace; None if there is none any more, or it turned out to be dead."""
        identifier = self._living(session, statement, value)
        if identifier is None or self._bury(session, identifier):
            return None
        name, hostname, pid, started_at = self._one(session, FIND_OWNER, id=identifier)
        return f"{name} (id {identifier}, pid {pid} on {hostname}, since {started_at:%Y-%m-%d %H:%M:%S %Z})"

    def _bury(self, session: Session, identifier: int) -> bool:
        """Declare a holder gone that died while there was no leader to see it; false if it lives."""
        if identifier not in self.silent(session):
            # A process that was killed this very moment still holds its lock for some milliseconds.
            time.sleep(GRACE)
        same_server = self.silent(session).get(identifier)
        if same_server is None:
            return self.is_gone(session, identifier)
        deadline = time.monotonic() + (GRACE if same_server else RELINK_GRACE)
        while time.monotonic() < deadline:
            time.sleep(GRACE / 3)
            if identifier not in self.silent(session):
                return self.is_gone(session, identifier)
        self.declare_gone(session, identifier, "its session ended")
        return self.is_gone(session, identifier)

    def _refuse_name(self, session: Session, name: str) -> None:
        if owner := self._living_owner(session, FIND_NAME, name):
            raise NameTaken(
                f"a living instance is called {name!r} already: {owner}. Choose another FLOTILLA_INSTANCE_NAME, leave "
                f"it unset to be given one, or let that one leave first with `flotilla down {name}`"
            )

    def _refuse_workspace(self, session: Session, wanted: Registration) -> None:
        assert wanted.workspace is not None
        if owner := self._living_owner(session, FIND_WORKSPACE, wanted.workspace):
            raise WorkspaceTaken(
                f"the workspace {wanted.workspace!r} is in use by {owner}. Let it leave first (`flotilla down`), "
                f"choose another FLOTILLA_WORKSPACE, or share it with --force if you know that both may write there"
            )


async def list_instances(database: Database) -> list[Instance]:
    """Read the register through the pool."""
    async with database.connection() as connection, connection.cursor(row_factory=class_row(Instance)) as cursor:
        await cursor.execute(database.namespace.sql(LIST))
        return await cursor.fetchall()
