"""The one pool. SQLAlchemy's engine borrows from it, so there is one budget and one place that knows about outages.

A pool that is left alone after an outage hands out dead connections one by one, or waits in a backoff it chose while
the database was away (half a minute, measured). This one is told: whoever meets a broken connection, and the link when
it breaks, calls `suspect()`. Then, once per outage, every connection is replaced, and until the database answers again
it is asked four times a second; after that the pool grows at once.

    what happens                                   what the pool does
    restart, crash, terminated backends            first error or the link tells; all connections replaced
    failover to another host of the address        the same; new connections find the primary
    a primary demoted under us (25006 on writes)   the same: reads would still work and hide it
    half-open connections                          the link gives up first and tells; TCP timers end the rest
    every connection is out                        `PoolTimeout` after `POOL_TIMEOUT`; no suspicion: it is only busy
    the database stays away                        a request fails within a second with `DatabaseAway`, not later
    it leads to another database than the link     the same, until both lead to one: the link's session has an advisory
                                                   lock, and each new connection looks whether that is taken

What was borrowed comes back. `_borrow` is the only way out and `give_back` the only way in. A connection is entered in
`_out` before anything can be cancelled, and it returns in a task of its own, which no cancellation of its borrower
reaches. SQLAlchemy returns a connection by closing it, so `close` of a connection that is out gives it back, whether it
is open or broken; psycopg's own `close` does nothing for one that is broken.

    how a block ends                               what happens to its connection
    normally, or with an error                     COMMIT or ROLLBACK, then it is idle again
    cancelled, also in COMMIT, or twice            rolled back; closed and replaced if that takes `RETURN_PATIENCE`
    its backend ended, wherever the block was      replaced
    its lane had an error                          closed and replaced

A caller that holds a session may need a second connection to go on: for a lock, a limit, a breaker, a key of `once`, a
trigger. So sessions of callers never take the last connections of the pool (`sessions_at_once`). Statements of the
fleet's own are short and need no second connection, hence they always end, and no caller waits for itself.

What it does not promise: that a caller gets a second session while all callers together hold as many as there are. It
waits for the others, `POOL_TIMEOUT` at most. Nor that a statement in flight when the connection broke did or did not
happen. It is never repeated here.
"""

import asyncio
import enum
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias
from uuid import uuid4

import psycopg
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool, PoolTimeout, TooManyRequests
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import NullPool

from app.fleet.background import Service, cancel_and_wait
from app.fleet.db.dsn import READ_COMMITTED, Addresses, pool_application, with_options
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.preflight import MARKER_IS_FREE
from app.fleet.errors import DatabaseUnreachable
from app.fleet.settings import FleetSettings
from app.fleet.telemetry.logs import events
from app.fleet.telemetry.redaction import redact

Connection: TypeAlias = psycopg.AsyncConnection[TupleRow]

UNFINISHED = (psycopg.pq.TransactionStatus.INTRANS, psycopg.pq.TransactionStatus.INERROR)
ENOUGH_TO_KEEP = 6
# How many lanes an engine has: to claim, to write what attempts report, to schedule.
LANES = 3
# One connection in so many, and at most so many of them, are left to statements of the fleet's own.
RESERVED_ONE_IN = 5
RESERVED_MOST = 4
PROBE_EVERY = 0.25
AWAY_PATIENCE = 1.0
# How long the ROLLBACK of a returned connection may take before the connection is closed instead.
RETURN_PATIENCE = 2.0
# How long a transaction may idle if `STATEMENT_TIMEOUT` is 0, which is no limit for statements alone.
IDLE_IN_TRANSACTION = 30.0
# So many times `STATEMENT_TIMEOUT` a transaction should not last: some statements, and some pauses between them.
OUT_TOO_LONG = 4
# Beyond the SQLSTATE classes 08 (connection) and 57P (shutdown): read-only means a demoted primary.
READ_ONLY = "25006"
ELSEWHERE = "DATABASE_URL leads to another database than the link's session"

log = events(__name__)


def sessions_at_once(pool_max: int) -> int:
    """How many sessions of callers a pool of this size lends at once; a pool of one has nothing to reserve."""
    lanes = LANES if pool_max >= ENOUGH_TO_KEEP else 0
    reserved = min(max(1, pool_max // RESERVED_ONE_IN), RESERVED_MOST)
    return max(1, pool_max - lanes - reserved)


class PooledConnection(psycopg.AsyncConnection[TupleRow]):
    """A connection of the pool. While it is out, closing it gives it back."""

    borrowed_from: "Database | None" = None

    async def close(self) -> None:
        if self.borrowed_from is not None:
            await self.borrowed_from.give_back(self)
        else:
            await super().close()

    def add_notice_handler(self, callback: Callable[[psycopg.errors.Diagnostic], None]) -> None:
        """Add a handler, once: SQLAlchemy adds the same one at every checkout."""
        if callback not in self._notice_handlers:
            super().add_notice_handler(callback)


class Probe(enum.Enum):
    """What the database answers after an outage."""

    AWAY = enum.auto()
    ELSEWHERE = enum.auto()
    FIT = enum.auto()


class DatabaseAway(DatabaseUnreachable):
    """The database does not answer right now; the pool is waiting for it to come back."""


def shows_an_outage(error: BaseException) -> bool:
    """Tell a broken or demoted server from a bad statement and from a busy pool."""
    if isinstance(error, PoolTimeout | TooManyRequests | psycopg.errors.QueryCanceled):
        return False
    if isinstance(error, psycopg.Error) and error.sqlstate:
        return error.sqlstate == READ_ONLY or error.sqlstate.startswith(("08", "57P"))
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)


# A commit that was acknowledged survives a crash of the server; stricter settings than `on` are left alone.
DURABLE = Statement("""
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
""")


# A lane's statements are planned once, when the tables may be small, and then used while they grow: each has an index
# to go by, and must not choose to read a table from end to end because it is short today. Before PostgreSQL 18 a plan
# that has no other choice looks so dear then that it would be compiled first, hence the second. The third: at the first
# use, and not after five, so that the first thousand runs of a day are claimed as quickly as the last.
#
# And the fourth: while a table is empty, comparing each row of a batch with each row found looks as good as anything,
# and a thousand with a thousand is a million. A statement that must go from row to row says LATERAL, and still does.
SURELY = Statement(
    "SET enable_seqscan = off; SET jit = off; SET plan_cache_mode = force_generic_plan; SET enable_nestloop = off"
)
# After how many uses the driver prepares a statement.
PREPARED_AFTER = 5


class DedicatedConnection:
    """One of the pool's connections, kept, for work that must not wait behind the service's own requests.

    It is in autocommit mode, and one task at a time uses it. After an error, or when the pool has lost the database
    meanwhile, it is closed and replaced at the next use. A pool of fewer than `ENOUGH_TO_KEEP` has none to spare:
    there, a lane borrows each time, like everyone.
    """

    def __init__(self, database: "Database") -> None:
        self._database = database
        self._turn = asyncio.Lock()
        self._kept: PooledConnection | None = None
        self._outage = 0

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        async with self._turn:
            if not self._database.keeps_lanes:
                async with self._database.autocommit() as connection:
                    yield connection
                return
            try:
                yield await self._ready()
            except BaseException as error:
                self._database.notice(error)
                # Whatever state it is in, another one is cheaper than finding out.
                await self._discard()
                raise

    async def close(self) -> None:
        async with self._turn:
            await self._discard()

    async def _ready(self) -> Connection:
        if self._kept is not None and (self._kept.closed or self._outage != self._database.outages):
            await self._discard()
        if self._kept is None:
            self._outage = self._database.outages
            self._kept = await self._database.keep()
            await self._kept.set_autocommit(True)
            # Through a pooler, nothing can be said to a session; there, statements are planned anew each time.
            if not self._database.pooled:
                # Several in one text, which cannot be prepared.
                await self._kept.execute(SURELY, prepare=False)
                self._kept.prepare_threshold = 0
        return self._kept

    async def _discard(self) -> None:
        """Make room for another: what was set for this lane must not be found by the next borrower."""
        connection, self._kept = self._kept, None
        if connection is not None:
            connection.pgconn.finish()
            await self._database.give_back(connection)


class Database(Service):
    name = "pool"

    def __init__(self, settings: FleetSettings, addresses: Addresses, namespace: Namespace) -> None:
        super().__init__()
        self.namespace = namespace
        # One for each start of the process. Drawn here: sessions carry it in their name before the instance joins.
        self.run_id = uuid4()
        self._settings = settings
        self.pooled = addresses.pooled
        self._conninfo = self._told(addresses)
        self._healthy = asyncio.Event()
        self._healthy.set()
        self._suspected = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self.outages = 0
        # Every connection that is out, and since when; of a lane's, which is out for as long as it lives, None.
        self._out: dict[PooledConnection, float | None] = {}
        self._sessions_free = asyncio.Semaphore(sessions_at_once(settings.pool_max))
        self._in_sessions: set[PooledConnection] = set()
        self._sessions_waiting = 0
        self._sessions_refused = 0
        self._link_marker: Callable[[], int | None] = lambda: None
        self._comparing: set[asyncio.Task[None]] = set()
        self._returning: set[asyncio.Task[None]] = set()
        self._most_waiting = settings.pool_max * 20
        self._pool: AsyncConnectionPool[PooledConnection] = AsyncConnectionPool(
            self._conninfo,
            connection_class=PooledConnection,
            kwargs={"prepare_threshold": None if addresses.pooled else PREPARED_AFTER},
            min_size=settings.pool_min,
            max_size=settings.pool_max,
            open=False,
            name=f"flotilla/{namespace.name}",
            timeout=settings.pool_timeout,
            # Beyond this, waiting longer would not help anyone: refuse, so that the client goes elsewhere.
            max_waiting=self._most_waiting,
            max_lifetime=900,
            configure=self._configure,
            # Give up quickly: the supervisor knows better than a backoff when to try again.
            reconnect_timeout=0.2,
        )
        self.engine = self._borrowing_engine()
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)

    @property
    def keeps_lanes(self) -> bool:
        return self._settings.pool_max >= ENOUGH_TO_KEEP

    @property
    def healthy(self) -> bool:
        return self._healthy.is_set()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Borrow a connection: committed at the end, rolled back on an error."""
        connection = await self._borrow()
        try:
            async with connection:
                yield connection
        except psycopg.Error as error:
            self.notice(error)
            raise
        finally:
            await self.give_back(connection)

    @asynccontextmanager
    async def autocommit(self) -> AsyncIterator[Connection]:
        """Borrow a connection on which every statement is a transaction of its own."""
        async with self.connection() as connection:
            await connection.set_autocommit(True)
            yield connection

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """Borrow an SQLAlchemy session: one transaction, committed at the end, rolled back on an error."""
        await self._until_healthy()
        async with self._sessions() as session, session.begin():
            yield session

    def unbegun(self) -> AsyncSession:
        """Make a session that borrows when it is first used; who asked for it commits and closes it."""
        return self._sessions()

    def dedicated(self) -> DedicatedConnection:
        """Make a lane: a connection of the pool that its user keeps."""
        return DedicatedConnection(self)

    async def keep(self) -> PooledConnection:
        """Borrow a connection for a lane, which gives it back itself."""
        connection = await self._borrow()
        self._out[connection] = None
        return connection

    async def give_back(self, connection: PooledConnection) -> None:
        """Return a connection to the pool, in whatever state it is. Again does nothing; a cancellation changes nothing.

        Who is cancelled here stops waiting; the task goes on.
        """
        if connection not in self._out:
            return
        del self._out[connection]
        connection.borrowed_from = None
        returning = asyncio.create_task(self._return(connection), name="pool-return")
        self._returning.add(returning)
        returning.add_done_callback(self._returning.discard)
        await asyncio.shield(returning)

    def oldest_out_seconds(self) -> float:
        """How long the connection borrowed first has been out; those of lanes do not count. Any thread may ask."""
        now = time.monotonic()
        return max((now - since for since in list(self._out.values()) if since is not None), default=0.0)

    def borrowed_too_long_seconds(self) -> float | None:
        """The same, if it is longer than any transaction should last."""
        seconds = self.oldest_out_seconds()
        return seconds if seconds > OUT_TOO_LONG * (self._settings.statement_timeout or IDLE_IN_TRANSACTION) else None

    @property
    def connections_out(self) -> int:
        """How many connections are borrowed right now, or on their way back; lanes keep theirs."""
        return len(self._out) + len(self._returning)

    async def ping(self) -> None:
        """Raise unless the database answers through the pool. A pool that is merely busy counts as an answer."""
        with suppress(PoolTimeout, TooManyRequests):
            async with self.connection() as connection:
                await connection.execute("SELECT 1")

    def suspect(self, reason: str) -> None:
        """Take the database for away until it has answered. Any task of the loop may call this."""
        if self.running and not self._suspected.is_set():
            log.warning("pool.suspected", reason=redact(reason))
            self.outages += 1
            self._healthy.clear()
            self._suspected.set()

    def compare_with(self, link_marker: Callable[[], int | None]) -> None:
        """From now on, each new connection must lead to the database where the link's session has this lock."""
        self._link_marker = link_marker

    def compare(self) -> None:
        """Compare in the background: the link is up, at first or again."""
        comparing = asyncio.create_task(self._compare(), name="pool-compare")
        self._comparing.add(comparing)
        comparing.add_done_callback(self._comparing.discard)

    def figures(self) -> dict[str, int]:
        """Return psycopg_pool's own counts, with those who wait for a session."""
        figures = Counter(self._pool.get_stats())
        figures["requests_waiting"] += self._sessions_waiting
        figures["requests_errors"] += self._sessions_refused
        return figures

    async def _start(self) -> None:
        await self._pool.open()
        try:
            await self._pool.wait(timeout=10)
        except PoolTimeout as error:
            raise DatabaseUnreachable(
                f"the pool could not open {self._settings.pool_min} connections within 10 s: check DATABASE_URL and "
                f"that the server has connections to spare (`flotilla doctor`)"
            ) from error
        self._supervisor = asyncio.create_task(self._supervise(), name="pool-supervisor")

    async def _stop(self) -> None:
        for task in (self._supervisor, *self._comparing):
            await cancel_and_wait(task)
        await self.engine.dispose()
        await asyncio.gather(*self._returning, return_exceptions=True)
        await self._pool.close(timeout=2)

    async def _until_healthy(self) -> None:
        if self._healthy.is_set():
            return
        try:
            async with asyncio.timeout(AWAY_PATIENCE):
                await self._healthy.wait()
        except TimeoutError:
            raise DatabaseAway("the database does not answer at the moment; try again shortly") from None

    def notice(self, error: BaseException) -> None:
        """Tell an outage from other errors, and suspect the database of it."""
        if shows_an_outage(error):
            self.suspect(f"{type(error).__name__}: {' '.join(str(error).split())}")

    async def _supervise(self) -> None:
        while True:
            await self._suspected.wait()
            since = asyncio.get_running_loop().time()
            await self._pool.drain()
            elsewhere = 0
            while (answer := await self._probe()) is not Probe.FIT:
                # Once may be a link that is breaking at this very moment.
                elsewhere += answer is Probe.ELSEWHERE
                if elsewhere == 2:
                    log.error("pool.elsewhere")
                await asyncio.sleep(PROBE_EVERY)
            # Connections opened while it was away may lead to the wrong host, or nowhere.
            await self._pool.drain()
            await self._pool.check()
            self._suspected.clear()
            self._healthy.set()
            log.info("pool.recovered", seconds=round(asyncio.get_running_loop().time() - since, 2))

    async def _probe(self) -> "Probe":
        try:
            async with await psycopg.AsyncConnection.connect(
                self._conninfo, autocommit=True, prepare_threshold=None
            ) as probe:
                row = await (await probe.execute("SHOW transaction_read_only")).fetchone()
                if row != ("off",):
                    return Probe.AWAY
                return Probe.ELSEWHERE if await self._leads_elsewhere(probe) else Probe.FIT
        except psycopg.Error:
            return Probe.AWAY

    async def _leads_elsewhere(self, connection: Connection) -> bool:
        """Whether the lock of the link's session is free where this connection leads."""
        mark = self._link_marker()
        if mark is None:
            return False
        row = await (await connection.execute(MARKER_IS_FREE, [mark])).fetchone()
        # By now, the link may have broken, and another session have another lock.
        return row == (True,) and self._link_marker() == mark

    async def _configure(self, connection: Connection) -> None:
        """Prepare a new connection of the pool; raise if it leads elsewhere."""
        if self.pooled:
            # Through a pooler, nothing can be set for a session: every BEGIN names its isolation level.
            await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        else:
            await connection.execute(DURABLE)
        elsewhere = await self._leads_elsewhere(connection)
        await connection.commit()
        if elsewhere:
            self.suspect(ELSEWHERE)
            raise DatabaseAway(ELSEWHERE)

    async def _compare(self) -> None:
        # If it does not answer now, the supervisor compares when it does.
        with suppress(psycopg.Error, DatabaseAway):
            async with self.autocommit() as connection:
                if await self._leads_elsewhere(connection):
                    self.suspect(ELSEWHERE)

    def _told(self, addresses: Addresses) -> str:
        """Set for each connection what the fleet relies on, whatever the server's, database's or role's defaults are.

        Through a pooler nothing can be set for a session; `preflight` looks at what must hold there.
        """
        if addresses.pooled:
            return addresses.pool
        limit = self._settings.statement_timeout
        return with_options(
            addresses.pool,
            application=pool_application(self.namespace, self.run_id),
            default_transaction_isolation=READ_COMMITTED,
            statement_timeout=int(limit * 1000),
            # Bounded in any case: a frozen instance in a guarded transaction would block a takeover for ever.
            idle_in_transaction_session_timeout=int((limit or IDLE_IN_TRANSACTION) * 1000),
            # A backend that sends an answer nobody reads notices neither of these.
            tcp_user_timeout=int(limit * 1000),
            # The pool keeps idle connections on purpose.
            idle_session_timeout=0,
            client_connection_check_interval=1000,
        )

    async def _borrow(self) -> PooledConnection:
        await self._until_healthy()
        try:
            connection = await self._pool.getconn()
        except psycopg.Error as error:
            self.notice(error)
            raise
        # Nothing is awaited between these lines: whatever has left the pool is known, and by whom it is closed.
        connection.borrowed_from = self
        self._out[connection] = time.monotonic()
        return connection

    async def _borrow_for_session(self) -> PooledConnection:
        """Borrow for SQLAlchemy: a session of a caller's, of which only so many are out at once."""
        await self._until_healthy()
        await self._wait_for_session()
        try:
            connection = await self._borrow()
        except BaseException:
            self._sessions_free.release()
            raise
        self._in_sessions.add(connection)
        return connection

    async def _wait_for_session(self) -> None:
        if self._sessions_waiting >= self._most_waiting:
            self._sessions_refused += 1
            raise TooManyRequests(f"{self._sessions_waiting} requests wait for a session of the pool already")
        self._sessions_waiting += 1
        try:
            async with asyncio.timeout(self._settings.pool_timeout):
                await self._sessions_free.acquire()
        except TimeoutError:
            self._sessions_refused += 1
            raise PoolTimeout(f"no session of the pool was free within {self._settings.pool_timeout:g} s") from None
        finally:
            self._sessions_waiting -= 1

    async def _return(self, connection: PooledConnection) -> None:
        try:
            await self._return_to_pool(connection)
        finally:
            if connection in self._in_sessions:
                self._in_sessions.remove(connection)
                self._sessions_free.release()

    async def _return_to_pool(self, connection: PooledConnection) -> None:
        try:
            async with asyncio.timeout(RETURN_PATIENCE):
                if connection.info.transaction_status in UNFINISHED:
                    await connection.rollback()
                await connection.set_autocommit(False)
        except (psycopg.Error, TimeoutError):
            connection.pgconn.finish()
        # What is closed, or in the middle of a statement, is replaced by the pool.
        await self._pool.putconn(connection)

    def _borrowing_engine(self) -> AsyncEngine:
        engine = create_async_engine(
            "postgresql+psycopg://",
            async_creator=self._borrow_for_session,
            poolclass=NullPool,
            # Asked for anew at every checkout otherwise.
            use_native_hstore=False,
            # An error's text is stored and logged; the values of a statement belong in neither.
            hide_parameters=True,
            execution_options={"schema_translate_map": {None: self.namespace.schema}},
        )

        @event.listens_for(engine.sync_engine, "handle_error")
        def notice(context: ExceptionContext) -> None:
            error = context.original_exception
            self.notice(error)
            if shows_an_outage(error):
                context.is_disconnect = True

        return engine
