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
    nobody gives a connection back                 `PoolTimeout` after `POOL_TIMEOUT`; no suspicion: it is only busy
    the database stays away                        a request fails within a second with `DatabaseAway`, not later

What it does not promise: that a statement in flight when the connection broke did or did not happen. It is never
repeated here.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias
from uuid import uuid4

import psycopg
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool, PoolTimeout, TooManyRequests
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import NullPool

from app.fleet.db.dsn import Addresses, pool_application, with_options
from app.fleet.db.namespace import Namespace
from app.fleet.errors import DatabaseUnreachable
from app.fleet.service import Service, let_go
from app.fleet.settings import FleetSettings
from app.fleet.telemetry.logs import events
from app.fleet.telemetry.redaction import redact

Connection: TypeAlias = psycopg.AsyncConnection[TupleRow]

IDLE = psycopg.pq.TransactionStatus.IDLE
ENOUGH_TO_KEEP = 6
PROBE_EVERY = 0.25
AWAY_PATIENCE = 1.0
# Beyond the SQLSTATE classes 08 (connection) and 57P (shutdown): read-only means a demoted primary.
READ_ONLY = "25006"

log = events(__name__)


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
DURABLE = """
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
"""


async def make_durable(connection: Connection) -> None:
    await connection.execute(DURABLE)
    await connection.commit()


# A lane's statements are planned once, when the tables may be small, and then used while they grow: each has an index
# to go by, and must not choose to read a table from end to end because it is short today. Before PostgreSQL 18 a plan
# that has no other choice looks so dear then that it would be compiled first, hence the second. The third: at the first
# use, and not after five, so that the first thousand runs of a day are claimed as quickly as the last.
#
# And the fourth: while a table is empty, comparing each row of a batch with each row found looks as good as anything,
# and a thousand with a thousand is a million. A statement that must go from row to row says LATERAL, and still does.
SURELY = b"SET enable_seqscan = off; SET jit = off; SET plan_cache_mode = force_generic_plan; SET enable_nestloop = off"
AS_USUAL = b"RESET enable_seqscan; RESET jit; RESET plan_cache_mode; RESET enable_nestloop"
# After how many uses the driver prepares a statement.
PREPARED_AFTER = 5


class Lane:
    """One of the pool's connections, kept, for work that must not wait behind the service's own requests.

    It is in autocommit mode, and one task at a time uses it. What broke is given back, and replaced at the next use.
    A pool of fewer than `ENOUGH_TO_KEEP` has none to spare: there, a lane borrows each time, like everyone.
    """

    def __init__(self, database: "Database") -> None:
        self._database = database
        self._turn = asyncio.Lock()
        self._kept: Connection | None = None
        self._outage = 0

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        async with self._turn:
            try:
                yield await self._ready()
            except BaseException as error:
                self._database.notice(error)
                # Whatever state it is in, another one is cheaper than finding out.
                await self._give_back(close=True)
                raise
            if not self._database.keeps_lanes:
                await self._give_back(close=False)

    async def close(self) -> None:
        async with self._turn:
            await self._give_back(close=False)

    async def _ready(self) -> Connection:
        if self._kept is not None and (self._kept.closed or self._outage != self._database.outages):
            await self._give_back(close=True)
        if self._kept is None:
            self._outage = self._database.outages
            self._kept = await self._database.lend()
            await self._kept.set_autocommit(True)
            await self._plan(self._kept, SURELY, 0)
        return self._kept

    async def _plan(self, connection: Connection, how: bytes, prepared_after: int) -> None:
        """Through a pooler, nothing can be said to a session; there, statements are planned anew each time."""
        if self._database.keeps_lanes and not self._database.pooled:
            # Several in one text, which cannot be prepared.
            await connection.execute(how, prepare=False)
            connection.prepare_threshold = prepared_after

    async def _give_back(self, *, close: bool) -> None:
        connection, self._kept = self._kept, None
        if connection is None:
            return
        if not close:
            try:
                await self._plan(connection, AS_USUAL, PREPARED_AFTER)
                await connection.set_autocommit(False)
            except psycopg.Error:
                # It broke while nobody looked; what is left is to make room for another.
                close = True
        await self._database.take_back(connection, close=close)


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
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            self._conninfo,
            kwargs={"prepare_threshold": None if addresses.pooled else PREPARED_AFTER},
            min_size=settings.pool_min,
            max_size=settings.pool_max,
            open=False,
            name=f"flotilla/{namespace.name}",
            timeout=settings.pool_timeout,
            # Beyond this, waiting longer would not help anyone: refuse, so that the client goes elsewhere.
            max_waiting=settings.pool_max * 20,
            max_lifetime=900,
            configure=None if addresses.pooled else make_durable,
            # Give up quickly: the supervisor knows better than a backoff when to try again.
            reconnect_timeout=0.2,
            close_returns=True,
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
        await self._until_healthy()
        try:
            async with self._pool.connection() as connection:
                yield connection
        except psycopg.Error as error:
            self.notice(error)
            raise

    @asynccontextmanager
    async def autocommit(self) -> AsyncIterator[Connection]:
        """Borrow a connection on which every statement is a transaction of its own."""
        async with self.connection() as connection:
            try:
                # Inside, because it may be cancelled here, after the mode has changed: psycopg lets the event loop run
                # once even when there is nothing to wait for. The next borrower would have no transaction then.
                await connection.set_autocommit(True)
                yield connection
            finally:
                if connection.info.transaction_status is IDLE:
                    await connection.set_autocommit(False)
                else:
                    connection.pgconn.finish()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """Borrow an SQLAlchemy session: one transaction, committed at the end, rolled back on an error."""
        await self._until_healthy()
        async with self._sessions() as session, session.begin():
            yield session

    def unbegun(self) -> AsyncSession:
        """Make a session that borrows when it is first used; who asked for it commits and closes it."""
        return self._sessions()

    def lane(self) -> Lane:
        """Make a lane: a connection of the pool that its user keeps."""
        return Lane(self)

    async def lend(self) -> Connection:
        await self._until_healthy()
        try:
            return await self._pool.getconn()
        except psycopg.Error as error:
            self.notice(error)
            raise

    async def take_back(self, connection: Connection, *, close: bool) -> None:
        if close:
            # `close` would return it to the pool, open (`close_returns`); what is broken must not come back.
            connection.pgconn.finish()
        await self._pool.putconn(connection)

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

    def figures(self) -> dict[str, int]:
        """Return psycopg_pool's own counts."""
        return self._pool.get_stats()

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
        await let_go(self._supervisor)
        await self.engine.dispose()
        await self._pool.close(timeout=2)

    async def _until_healthy(self) -> None:
        if self._healthy.is_set():
            return
        try:
            await asyncio.wait_for(self._healthy.wait(), AWAY_PATIENCE)
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
            while not await self._answers():  # noqa: ASYNC110 — the database announces nothing
                await asyncio.sleep(PROBE_EVERY)
            # Connections opened while it was away may lead to the wrong host, or nowhere.
            await self._pool.drain()
            await self._pool.check()
            self._suspected.clear()
            self._healthy.set()
            log.info("pool.recovered", seconds=round(asyncio.get_running_loop().time() - since, 2))

    async def _answers(self) -> bool:
        try:
            async with await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True) as probe:
                row = await (await probe.execute("SHOW transaction_read_only")).fetchone()
                return row == ("off",)
        except psycopg.Error:
            return False

    def _told(self, addresses: Addresses) -> str:
        """Say to each connection what holds for it; through a pooler nothing can be said."""
        if addresses.pooled:
            return addresses.pool
        milliseconds = int(self._settings.statement_timeout * 1000)
        return with_options(
            addresses.pool,
            application=pool_application(self.namespace, self.run_id),
            statement_timeout=milliseconds,
            idle_in_transaction_session_timeout=milliseconds,
            # A backend that sends an answer nobody reads notices neither of these.
            tcp_user_timeout=milliseconds,
            client_connection_check_interval=1000,
        )

    def _borrowing_engine(self) -> AsyncEngine:
        async def borrow() -> Any:
            await self._until_healthy()
            try:
                return await self._pool.getconn()
            except psycopg.Error as error:
                self.notice(error)
                raise

        engine = create_async_engine(
            "postgresql+psycopg://",
            async_creator=borrow,
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
