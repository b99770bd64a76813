"""The pool survives restarts, failovers and broken connections, and serves soon after the database is back."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import psycopg
import pytest
from psycopg_pool import PoolTimeout
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from app.fleet.db import dsn
from app.fleet.db.direct import open_session
from app.fleet.db.migrations import alembic_session
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Database, DatabaseAway
from app.settings import Settings
from tests.support.pgbouncer import pgbouncer
from tests.support.postgres import Postgres
from tests.support.proxy import Proxy

pytestmark = pytest.mark.anyio
# Less than the longest pause between two attempts to connect.
SOON = 5.0


@asynccontextmanager
async def pool(address: str, **settings: object) -> AsyncIterator[Database]:
    # A busy machine may take seconds to open a connection.
    usual = {"pool_min": 10, "pool_max": 10, "pool_timeout": 60.0}
    given = Settings.load(database_url=address, **{**usual, **settings})
    database = Database(given, dsn.resolve(given), Namespace("flotilla"))
    await database.start()
    try:
        yield database
    finally:
        await database.stop()


async def query(database: Database) -> int:
    async with database.session() as session:
        return int((await session.execute(text("SELECT 42"))).scalar_one())


async def seconds_until_served(database: Database, within: float = 30) -> float:
    """Query until ten queries in a row have succeeded."""
    began = time.monotonic()
    served = 0
    while served < 10:
        try:
            await query(database)
            served += 1
        except (psycopg.Error, DBAPIError, DatabaseAway):
            served = 0
            await asyncio.sleep(0.02)
        assert time.monotonic() - began < within, "the pool never served again"
    return time.monotonic() - began


async def test_every_connection_broken_by_a_restart_is_replaced_at_the_first_error(own_postgres: Postgres) -> None:
    async with pool(own_postgres.address_of()) as database:
        await query(database)
        await asyncio.to_thread(own_postgres.stop, "immediate")
        await asyncio.to_thread(own_postgres.start_again)
        failures = 0
        for _ in range(50):
            # A query waits for the pool for a second only; on a busy machine, the pool may need longer to recover.
            async with asyncio.timeout(SOON):
                await database._supervisor.wait_until_healthy()
            try:
                await query(database)
            except (psycopg.Error, DBAPIError):
                failures += 1
        # One query fails. If the pool were not emptied then, one query would fail for each of the ten connections.
        assert failures <= 2
        assert await seconds_until_served(database) < SOON


async def test_after_an_outage_the_pool_serves_as_soon_as_the_database_is_back(own_postgres: Postgres) -> None:
    async with pool(own_postgres.address_of()) as database:
        await asyncio.to_thread(own_postgres.stop, "immediate")
        with pytest.raises((psycopg.Error, DBAPIError)):
            await query(database)
        assert not database.healthy
        # Long enough that all backoff delays have grown.
        await asyncio.sleep(8)
        await asyncio.to_thread(own_postgres.start_again)
        assert await seconds_until_served(database) < SOON
        assert database.healthy


async def test_during_an_outage_requests_fail_quickly_with_database_away(own_postgres: Postgres) -> None:
    async with pool(own_postgres.address_of()) as database:
        await asyncio.to_thread(own_postgres.stop, "immediate")
        with pytest.raises((psycopg.Error, DBAPIError)):
            await query(database)
        began = time.monotonic()
        results = await asyncio.gather(*(query(database) for _ in range(50)), return_exceptions=True)
        assert {type(result) for result in results} == {DatabaseAway}
        assert time.monotonic() - began < 4


async def test_after_a_failover_the_pool_connects_to_the_other_host_of_the_address(own_postgres: Postgres) -> None:
    standby = await asyncio.to_thread(own_postgres.standby, own_postgres.home.parent / "standby")
    try:
        both = (
            f"host=127.0.0.1,127.0.0.1 port={own_postgres.port},{standby.port} user=postgres dbname=postgres "
            f"target_session_attrs=read-write"
        )
        async with pool(both) as database:
            await query(database)
            await asyncio.to_thread(own_postgres.stop, "immediate")
            await asyncio.to_thread(standby.promote)
            assert await seconds_until_served(database) < SOON
            async with database.session() as session:
                port = (await session.execute(text("SELECT inet_server_port()"))).scalar_one()
                await session.execute(text("CREATE TABLE proof_of_writing ()"))
            assert port == standby.port
    finally:
        await asyncio.to_thread(standby.destroy)


async def test_the_pool_leaves_a_demoted_primary_at_the_first_refused_write(
    own_postgres: Postgres, postgres: Postgres
) -> None:
    """Reads still work on it, so only a write shows that it is no primary any more."""
    both = f"host=127.0.0.1,127.0.0.1 port={own_postgres.port},{postgres.port} user=postgres dbname=postgres"
    async with pool(both) as database:
        await query(database)
        own_postgres.set("default_transaction_read_only", "on")
        await query(database)
        with pytest.raises(DBAPIError) as refused:
            async with database.session() as session_:
                await session_.execute(text("CREATE TABLE refused ()"))
        assert isinstance(refused.value.orig, psycopg.errors.ReadOnlySqlTransaction)

        assert await seconds_until_served(database) < SOON
        async with database.session() as session_:
            assert (await session_.execute(text("SELECT inet_server_port()"))).scalar_one() == postgres.port


async def test_half_open_connections_are_replaced_after_a_suspicion(postgres: Postgres, address: str) -> None:
    name = address.rpartition("/")[2]
    with Proxy(("127.0.0.1", postgres.port)) as proxy:
        async with pool(f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}") as database:
            await query(database)
            proxy.swallow()
            proxy.heal()
            # All idle connections are dead, and the pool does not know it. The link detects that first and reports it.
            database.suspect("the link broke")
            assert await seconds_until_served(database) < SOON


async def test_reset_connections_are_replaced(postgres: Postgres, address: str) -> None:
    name = address.rpartition("/")[2]
    with Proxy(("127.0.0.1", postgres.port)) as proxy:
        async with pool(f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}") as database:
            await query(database)
            proxy.cut()
            assert await seconds_until_served(database) < SOON


async def test_a_busy_pool_is_not_an_outage(address: str) -> None:
    async with pool(address, pool_min=1, pool_max=1, pool_timeout=0.2) as database:
        async with database.connection():
            with pytest.raises(PoolTimeout):
                async with database.connection():
                    pass
            await database.ping()
        assert database.healthy
        assert database.outages == 0


async def test_a_failed_statement_is_not_an_outage(address: str) -> None:
    limit = "SET LOCAL statement_timeout = '100ms'"
    async with pool(address) as database:
        for statement in ("SELECT 1/0", "SELECT * FROM nowhere", "SELECT pg_sleep(5)"):
            with pytest.raises(DBAPIError):
                async with database.session() as session:
                    await session.execute(text(limit))
                    await session.execute(text(statement))
            with pytest.raises(psycopg.Error):
                async with database.connection() as connection:
                    await connection.execute(limit)
                    await connection.execute(statement.encode())
        assert database.healthy
        assert database.outages == 0


async def test_sessions_borrow_connections_of_the_pool_and_return_them(address: str) -> None:
    async with pool(address, pool_min=3, pool_max=3) as database:
        for _ in range(20):
            await query(database)
        async with database.session() as first, database.session() as second:
            await first.execute(text("SELECT 1"))
            await second.execute(text("SELECT 1"))
            assert database.stats()["pool_available"] == 1
        assert database.stats()["pool_available"] == 3
        with suppress(ValueError):
            async with database.session() as session:
                await session.execute(text("CREATE TABLE never_there ()"))
                raise ValueError("undo this")
        async with database.session() as session:
            assert (await session.execute(text("SELECT to_regclass('never_there')"))).scalar_one() is None


async def test_only_dedicated_connections_prefer_index_plans(address: str) -> None:
    async with pool(address, pool_min=1, pool_max=6) as database:
        dedicated = database.dedicated()
        async with dedicated.connection() as connection:
            assert await (await connection.execute("SHOW enable_seqscan")).fetchone() == ("off",)
        await dedicated.close()
        for _ in range(6):
            async with database.connection() as connection:
                assert await (await connection.execute("SHOW enable_seqscan")).fetchone() == ("on",)
                assert await (await connection.execute("SHOW jit")).fetchone() == await jit_by_default(address)
                assert not connection.autocommit


async def test_a_dedicated_connection_that_broke_while_idle_can_be_replaced(address: str) -> None:
    async with pool(address, pool_min=1, pool_max=6) as database:
        dedicated = database.dedicated()
        async with dedicated.connection() as connection:
            broken = connection.info.backend_pid
        async with await psycopg.AsyncConnection.connect(address, autocommit=True) as other:
            await other.execute("SELECT pg_terminate_backend(%s, 60000)", [broken])
        await dedicated.close()
        async with dedicated.connection() as connection:
            assert connection.info.backend_pid != broken
        await dedicated.close()


async def test_a_borrower_that_is_cancelled_at_any_point_leaves_no_connection_in_autocommit(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the event loop is busy, psycopg lets other tasks run within `set_autocommit`."""
    monkeypatch.setattr("psycopg.waiting.MAX_BUSY_TIME", 0.0)

    async def borrow(database: Database) -> None:
        async with database.autocommit() as connection:
            await connection.execute("SELECT 1")

    async with pool(address, pool_min=1, pool_max=1) as database:
        for turns in range(12):
            borrowing = asyncio.create_task(borrow(database))
            for _ in range(turns):
                await asyncio.sleep(0)
            borrowing.cancel()
            await asyncio.gather(borrowing, return_exceptions=True)
            async with database.connection() as connection:
                assert not connection.autocommit, f"cancelled after {turns} turns of the event loop"


async def jit_by_default(address: str) -> object:
    async with await psycopg.AsyncConnection.connect(address) as connection:
        return await (await connection.execute("SHOW jit")).fetchone()


# -- settings of every session ----------------------------------------------------------------------------------------

SERIALIZABLE = "default_transaction_isolation = 'serializable'"
UNUSUAL_TIMEOUTS = ("idle_session_timeout = '300ms'", "idle_in_transaction_session_timeout = 0")


def set_defaults(address: str, *settings: str) -> None:
    with psycopg.connect(address, autocommit=True) as session:
        for setting in settings:
            session.execute(f'ALTER DATABASE "{address.rpartition("/")[2]}" SET {setting}')


async def isolation_of(connection: psycopg.AsyncConnection[tuple[object, ...]]) -> object:
    return await (await connection.execute("SHOW transaction_isolation")).fetchone()


async def test_every_session_is_read_committed_whatever_the_default_of_the_database(address: str) -> None:
    set_defaults(address, SERIALIZABLE)
    async with pool(address, pool_min=1, pool_max=6) as database:
        async with database.session() as session:
            assert (await session.execute(text("SHOW transaction_isolation"))).scalar_one() == "read committed"
        async with database.connection() as connection:
            assert await isolation_of(connection) == ("read committed",)
        async with database.autocommit() as connection:
            assert await isolation_of(connection) == ("read committed",)
        dedicated = database.dedicated()
        async with dedicated.connection() as connection:
            assert await isolation_of(connection) == ("read committed",)
        await dedicated.close()
    with open_session(address, application="trial") as direct:
        assert direct.execute("SHOW transaction_isolation").fetchone() == ("read committed",)
    with alembic_session(address, Namespace("flotilla")) as direct:
        assert direct.execute("SHOW transaction_isolation").fetchone() == ("read committed",)


async def test_through_a_pooler_every_transaction_is_read_committed(address: str, postgres: Postgres) -> None:
    # Without a timeout for idle sessions: a busy PgBouncer may lend one that PostgreSQL has just ended.
    set_defaults(address, SERIALIZABLE)
    name = address.rpartition("/")[2]
    with pgbouncer(postgres) as port:
        through = f"postgresql://postgres@127.0.0.1:{port}/{name}"
        async with pool(through, database_direct_url=address, pool_min=1) as database:
            async with database.session() as session:
                assert (await session.execute(text("SHOW transaction_isolation"))).scalar_one() == "read committed"
            async with database.connection() as connection:
                assert await isolation_of(connection) == ("read committed",)
            async with database.autocommit() as connection, connection.transaction():
                assert await isolation_of(connection) == ("read committed",)


async def test_idle_connections_are_kept_and_idle_transactions_are_not(address: str) -> None:
    """Whatever the defaults of the database, and also if statements have no time limit."""
    set_defaults(address, *UNUSUAL_TIMEOUTS)
    for given, bound in ((0, "30s"), (12, "12s")):
        async with pool(address, pool_min=1, statement_timeout=given) as database, database.connection() as connection:
            for name, value in (("idle_session_timeout", "0"), ("idle_in_transaction_session_timeout", bound)):
                assert await (await connection.execute(f"SHOW {name}")).fetchone() == (value,)
