"""The one pool of an instance. SQLAlchemy's engine borrows from it, so there is one budget and one outage detection.

    what happens                                     what the pool does
    restart, crash, terminated backends              first error or broken link: all connections are replaced
    failover to another host of the address          the same; the new connections find the primary
    the primary is demoted (25006 on writes)         the same; reads would still work and hide it
    half-open connections                            the link breaks first; TCP timers end the rest
    every connection is borrowed                     `PoolTimeout` after `POOL_TIMEOUT`; the pool is busy, no outage
    the database stays unavailable                   a request fails with `DatabaseAway` within a second
    the pool leads to another database than the      the same, until both lead to the same database; each new
      link                                           connection is compared

`supervisor.py` has the outage detection, `session_slots.py` the limit on sessions of callers.

Every borrowed connection is returned. `_borrow` is the only way out of the pool and `return_connection` the only way
in. A connection is entered in `_borrowed` before anything can be cancelled, and it is returned by its own task, which
no cancellation of the borrower reaches. SQLAlchemy returns a connection by closing it, so `close` on a borrowed
connection returns it, whether it is open or broken; psycopg's own `close` does nothing on a broken one.

    how a block ends                                 what happens to its connection
    normally, or with an error                       COMMIT or ROLLBACK, then it is idle again
    cancelled, also in COMMIT, or twice              rolled back; closed and replaced if that exceeds `RETURN_TIMEOUT`
    its backend was terminated, at any point         replaced
    an error on a dedicated connection               closed and replaced

Not guaranteed: whether a statement took effect that was in flight when its connection broke. The pool never repeats it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias
from uuid import uuid4

import psycopg
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool, PoolTimeout, TooManyRequests
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from app.fleet.background import BackgroundTasks, Service
from app.fleet.db.dsn import IDLE_IN_TRANSACTION, Addresses, pool_conninfo
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.dedicated import MIN_POOL_SIZE, DedicatedConnection
from app.fleet.db.pool.session_slots import SessionSlots
from app.fleet.db.pool.sqlalchemy_engine import borrowing_engine
from app.fleet.db.pool.supervisor import Supervisor
from app.fleet.errors import DatabaseUnreachable
from app.fleet.settings import FleetSettings
from app.fleet.telemetry.metrics import POOL_WAIT

Connection: TypeAlias = psycopg.AsyncConnection[TupleRow]

UNFINISHED = (psycopg.pq.TransactionStatus.INTRANS, psycopg.pq.TransactionStatus.INERROR)
# How long a request waits for the end of an outage.
OUTAGE_TIMEOUT = 1.0
# How long the ROLLBACK of a returned connection may take before the connection is closed instead.
RETURN_TIMEOUT = 2.0
# A transaction is a few statements with pauses in between: it should take less than this times `STATEMENT_TIMEOUT`.
BORROWED_TOO_LONG = 4
# A demoted primary refuses writes with this SQLSTATE. An outage also shows by the classes 08 (connection) and 57P
# (shutdown).
READ_ONLY = "25006"
ELSEWHERE = "DATABASE_URL leads to another database than the link's session"
# The driver prepares a statement after this many uses.
PREPARE_THRESHOLD = 5


class PooledConnection(psycopg.AsyncConnection[TupleRow]):
    """A connection of the pool. While it is borrowed, closing it returns it."""

    borrowed_from: "Database | None" = None

    async def close(self) -> None:
        if self.borrowed_from is not None:
            await self.borrowed_from.return_connection(self)
        else:
            await super().close()

    def add_notice_handler(self, callback: Callable[[psycopg.errors.Diagnostic], None]) -> None:
        """Add a handler unless it is there: SQLAlchemy adds the same one at every checkout."""
        if callback not in self._notice_handlers:
            super().add_notice_handler(callback)


class DatabaseAway(DatabaseUnreachable):
    """The database is unavailable at the moment; the pool is waiting for it."""


def shows_an_outage(error: BaseException) -> bool:
    """Distinguish a broken or demoted server from a failed statement and from a busy pool."""
    if isinstance(error, PoolTimeout | TooManyRequests | psycopg.errors.QueryCanceled):
        return False
    if isinstance(error, psycopg.Error) and error.sqlstate:
        return error.sqlstate == READ_ONLY or error.sqlstate.startswith(("08", "57P"))
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)


# An acknowledged commit survives a crash of the server. Stricter settings than `on` are left unchanged.
DURABLE = Statement("""
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
""")


class Database(Service):
    name = "pool"

    def __init__(self, settings: FleetSettings, addresses: Addresses, namespace: Namespace) -> None:
        super().__init__()
        self.namespace = namespace
        # One per start of the process. Made here because sessions have it in their name before the instance joins.
        self.run_id = uuid4()
        self._settings = settings
        self.pooled = addresses.pooled
        conninfo = pool_conninfo(addresses, settings, namespace, self.run_id)
        # Every borrowed connection and when it was borrowed; None for a dedicated connection, which is kept.
        self._borrowed: dict[PooledConnection, float | None] = {}
        self._in_sessions: set[PooledConnection] = set()
        self._comparing = BackgroundTasks()
        self._returning: set[asyncio.Task[None]] = set()
        max_waiting = settings.pool_max * 20
        self._slots = SessionSlots(settings.pool_max, timeout=settings.pool_timeout, max_waiting=max_waiting)
        self._pool: AsyncConnectionPool[PooledConnection] = AsyncConnectionPool(
            conninfo,
            connection_class=PooledConnection,
            kwargs={"prepare_threshold": None if addresses.pooled else PREPARE_THRESHOLD},
            min_size=settings.pool_min,
            max_size=settings.pool_max,
            open=False,
            name=f"flotilla/{namespace.name}",
            timeout=settings.pool_timeout,
            # Beyond this, refuse at once, so that the client tries another instance.
            max_waiting=max_waiting,
            max_lifetime=900,
            configure=self._configure,
            # Give up quickly: the supervisor reconnects sooner than a backoff that has grown.
            reconnect_timeout=0.2,
        )
        self._supervisor = Supervisor(self._pool, conninfo)
        self.engine = borrowing_engine(self._borrow_for_session, self.report_error, namespace.schema)
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)

    @property
    def has_dedicated_connections(self) -> bool:
        return self._settings.pool_max >= MIN_POOL_SIZE

    @property
    def healthy(self) -> bool:
        return self._supervisor.healthy

    @property
    def outages(self) -> int:
        return self._supervisor.outages

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Borrow a connection: committed at the end, rolled back on an error."""
        connection = await self._borrow()
        try:
            async with connection:
                yield connection
        except psycopg.Error as error:
            self.report_error(error)
            raise
        finally:
            await self.return_connection(connection)

    @asynccontextmanager
    async def autocommit(self) -> AsyncIterator[Connection]:
        """Borrow a connection in autocommit mode: each statement is its own transaction."""
        async with self.connection() as connection:
            await connection.set_autocommit(True)
            yield connection

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """Borrow an SQLAlchemy session: one transaction, committed at the end, rolled back on an error."""
        await self._until_healthy()
        async with self._sessions() as session, session.begin():
            yield session

    def new_session(self) -> AsyncSession:
        """Make a session that borrows at its first use; the caller commits and closes it."""
        return self._sessions()

    def dedicated(self) -> DedicatedConnection:
        """Make a dedicated connection: the user keeps it and closes it."""
        return DedicatedConnection(self)

    async def borrow_dedicated(self) -> PooledConnection:
        """Borrow a connection for a `DedicatedConnection`, which returns it itself."""
        connection = await self._borrow()
        self._borrowed[connection] = None
        return connection

    async def return_connection(self, connection: PooledConnection) -> None:
        """Return a connection to the pool, in whatever state it is; returning it twice has no effect.

        A cancelled caller stops waiting here, but the connection is returned all the same.
        """
        if connection not in self._borrowed:
            return
        del self._borrowed[connection]
        connection.borrowed_from = None
        returning = asyncio.create_task(self._return(connection), name="pool-return")
        self._returning.add(returning)
        returning.add_done_callback(self._returning.discard)
        await asyncio.shield(returning)

    def longest_borrowed_seconds(self) -> float:
        """Return the age of the oldest borrowed connection, except dedicated ones. Any thread may call this."""
        now = time.monotonic()
        return max((now - since for since in list(self._borrowed.values()) if since is not None), default=0.0)

    def borrowed_too_long_seconds(self) -> float | None:
        """Return the same if it is longer than a transaction should take, else None."""
        seconds = self.longest_borrowed_seconds()
        limit = BORROWED_TOO_LONG * (self._settings.statement_timeout or IDLE_IN_TRANSACTION)
        return seconds if seconds > limit else None

    @property
    def borrowed_connections(self) -> int:
        """The number of connections that are borrowed or being returned, dedicated ones included."""
        return len(self._borrowed) + len(self._returning)

    async def ping(self) -> None:
        """Raise unless the database answers through the pool. A busy pool counts as an answer."""
        with suppress(PoolTimeout, TooManyRequests):
            async with self.connection() as connection:
                await connection.execute("SELECT 1")

    def suspect(self, reason: str) -> None:
        """Treat the database as unavailable until a probe succeeds. Any task of the event loop may call this."""
        if self.running:
            self._supervisor.suspect(reason)

    def compare_with(self, link_marker: Callable[[], int | None]) -> None:
        """From now on, each new connection must lead to the database in which the link's session holds this marker."""
        self._supervisor.compare_with(link_marker)

    def compare(self) -> None:
        """Compare the databases in the background, because the link has come up."""
        self._comparing.start(self._compare())

    def stats(self) -> dict[str, int]:
        """Return psycopg_pool's counts, with the requests that wait for a session slot."""
        stats = Counter(self._pool.get_stats())
        stats["requests_waiting"] += self._slots.waiting
        stats["requests_errors"] += self._slots.refused
        return stats

    async def _start(self) -> None:
        await self._pool.open()
        try:
            await self._pool.wait(timeout=10)
        except PoolTimeout as error:
            raise DatabaseUnreachable(
                f"the pool could not open {self._settings.pool_min} connections within 10 s: check DATABASE_URL and "
                f"that the server has free connections (`flotilla doctor`)"
            ) from error
        self._supervisor.start()

    async def _stop(self) -> None:
        await self._supervisor.stop()
        await self._comparing.stop()
        await self.engine.dispose()
        await asyncio.gather(*self._returning, return_exceptions=True)
        await self._pool.close(timeout=2)

    async def _until_healthy(self) -> None:
        if self._supervisor.healthy:
            return
        try:
            async with asyncio.timeout(OUTAGE_TIMEOUT):
                await self._supervisor.wait_until_healthy()
        except TimeoutError:
            raise DatabaseAway("the database does not answer at the moment; try again shortly") from None

    def report_error(self, error: BaseException) -> bool:
        """Begin an outage if the error shows one; return whether it does."""
        outage = shows_an_outage(error)
        if outage:
            self.suspect(f"{type(error).__name__}: {' '.join(str(error).split())}")
        return outage

    async def _configure(self, connection: Connection) -> None:
        """Set up a new connection of the pool; raise if it leads to another database than the link."""
        if self.pooled:
            # Behind a pooler, nothing can be set for a session: every BEGIN names its isolation level.
            await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        else:
            await connection.execute(DURABLE)
        elsewhere = await self._supervisor.leads_elsewhere(connection)
        await connection.commit()
        if elsewhere:
            self.suspect(ELSEWHERE)
            raise DatabaseAway(ELSEWHERE)

    async def _compare(self) -> None:
        # If the database does not answer now, the supervisor compares when it does.
        with suppress(psycopg.Error, DatabaseAway):
            async with self.autocommit() as connection:
                if await self._supervisor.leads_elsewhere(connection):
                    self.suspect(ELSEWHERE)

    async def _borrow(self) -> PooledConnection:
        await self._until_healthy()
        began = time.monotonic()
        try:
            connection = await self._pool.getconn()
        except psycopg.Error as error:
            self.report_error(error)
            raise
        # No await between these lines: a connection that has left the pool is always in `_borrowed`.
        connection.borrowed_from = self
        self._borrowed[connection] = now = time.monotonic()
        POOL_WAIT.observe(now - began)
        return connection

    async def _borrow_for_session(self) -> PooledConnection:
        """Borrow for a caller's SQLAlchemy session, with a session slot."""
        await self._until_healthy()
        await self._slots.take()
        try:
            connection = await self._borrow()
        except BaseException:
            self._slots.release()
            raise
        self._in_sessions.add(connection)
        return connection

    async def _return(self, connection: PooledConnection) -> None:
        try:
            await self._return_to_pool(connection)
        finally:
            if connection in self._in_sessions:
                self._in_sessions.remove(connection)
                self._slots.release()

    async def _return_to_pool(self, connection: PooledConnection) -> None:
        try:
            async with asyncio.timeout(RETURN_TIMEOUT):
                if connection.info.transaction_status in UNFINISHED:
                    await connection.rollback()
                await connection.set_autocommit(False)
        except (psycopg.Error, TimeoutError):
            connection.pgconn.finish()
        # The pool replaces a connection that is closed or in the middle of a statement.
        await self._pool.putconn(connection)
