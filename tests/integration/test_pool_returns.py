"""Whatever is borrowed from the pool comes back, however the block that borrowed it ends.

Every way to borrow is combined with every way to end. Each end is tried at one turn of the event loop after another, so
it meets each statement of the block's life: the wait for a connection, BEGIN, the statements, COMMIT or ROLLBACK, and
the return itself. Each end occurs more often than the pool has connections.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import psycopg
import pytest
from psycopg_pool import PoolTimeout, TooManyRequests
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from app.fleet.db import dsn
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Database, DatabaseAway, PooledConnection
from app.fleet.db.pool.session_slots import session_limit
from app.settings import Settings
from tests.support.postgres import Postgres
from tests.support.service import service

pytestmark = pytest.mark.anyio

# Large enough for dedicated connections, small enough to be used up within one walk.
SIZE = 6


class Refused(Exception):
    """What a block raises by itself."""


@asynccontextmanager
async def pool(address: str, **settings: object) -> AsyncIterator[Database]:
    # A busy machine may take seconds to open a connection.
    given = Settings.load(database_url=address, **{"pool_min": 2, "pool_max": SIZE, "pool_timeout": 60.0, **settings})
    database = Database(given, dsn.resolve(given), Namespace("flotilla"))
    await database.start()
    try:
        yield database
    finally:
        await database.stop()


# -- the ways to borrow -----------------------------------------------------------------------------------------------


async def commits_a_session(database: Database) -> None:
    async with database.session() as session:
        await session.execute(text("SELECT 1"))
        await session.execute(text("SELECT 2"))


async def rolls_a_session_back(database: Database) -> None:
    async with database.session() as session:
        await session.execute(text("SELECT 1"))
        raise Refused


async def fails_in_a_session(database: Database) -> None:
    async with database.session() as session:
        await session.execute(text("SELECT 1/0"))


async def catches_what_fails_in_a_session(database: Database) -> None:
    async with database.session() as session:
        with suppress(SQLAlchemyError):
            await session.execute(text("SELECT 1/0"))


async def uses_a_session_for_two_transactions(database: Database) -> None:
    async with database.new_session() as session:
        await session.execute(text("SELECT 1"))
        await session.commit()
        await session.execute(text("SELECT 2"))
        await session.rollback()
        await session.execute(text("SELECT 3"))


async def commits_a_connection(database: Database) -> None:
    async with database.connection() as connection:
        await connection.execute("SELECT 1")
        await connection.execute("SELECT 2")


async def rolls_a_connection_back(database: Database) -> None:
    async with database.connection() as connection:
        await connection.execute("SELECT 1")
        raise Refused


async def uses_autocommit(database: Database) -> None:
    async with database.autocommit() as connection:
        await connection.execute("SELECT 1")
        async with connection.transaction():
            await connection.execute("SELECT 2")


async def fails_in_autocommit(database: Database) -> None:
    async with database.autocommit() as connection, connection.transaction():
        await connection.execute("SELECT 1/0")


async def uses_a_dedicated_connection(database: Database) -> None:
    dedicated = database.dedicated()
    try:
        async with dedicated.connection() as connection:
            await connection.execute("SELECT 1")
        async with dedicated.connection() as connection:
            await connection.execute("SELECT 2")
    finally:
        await asyncio.shield(asyncio.create_task(dedicated.close()))


async def fails_in_a_dedicated_connection(database: Database) -> None:
    dedicated = database.dedicated()
    async with dedicated.connection() as connection:
        await connection.execute("SELECT 1/0")


Way = Callable[[Database], Awaitable[None]]
WAYS: tuple[Way, ...] = (
    commits_a_session,
    rolls_a_session_back,
    fails_in_a_session,
    catches_what_fails_in_a_session,
    uses_a_session_for_two_transactions,
    commits_a_connection,
    rolls_a_connection_back,
    uses_autocommit,
    fails_in_autocommit,
    uses_a_dedicated_connection,
    fails_in_a_dedicated_connection,
)


# -- the ways to end --------------------------------------------------------------------------------------------------


async def is_cancelled(task: "asyncio.Task[None]", _: set[PooledConnection]) -> None:
    task.cancel()


async def is_cancelled_twice(task: "asyncio.Task[None]", _: set[PooledConnection]) -> None:
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()


async def loses_its_connection(_: "asyncio.Task[None]", born: set[PooledConnection]) -> None:
    hang_up(born)


async def loses_its_connection_and_is_cancelled(task: "asyncio.Task[None]", born: set[PooledConnection]) -> None:
    hang_up(born)
    await asyncio.sleep(0)
    task.cancel()


def hang_up(connections: set[PooledConnection]) -> None:
    """End their sessions at the socket, without psycopg's knowledge, as a crash of the server does."""
    for connection in connections:
        if not connection.pgconn.status:
            with socket.socket(fileno=os.dup(connection.pgconn.socket)) as wire, suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)


# Each end, and how many turns later it is tried next. A lost connection costs the pool a new start each time.
STEPS: dict[Callable[..., Awaitable[None]], int] = {
    is_cancelled: 1,
    is_cancelled_twice: 2,
    loses_its_connection: 5,
    loses_its_connection_and_is_cancelled: 5,
}
# What a block may raise when it ends so. Anything else is a defect.
EXPECTED = (Refused, psycopg.Error, SQLAlchemyError, DatabaseAway, asyncio.CancelledError)


@pytest.fixture
def born(monkeypatch: pytest.MonkeyPatch) -> set[PooledConnection]:
    """Every connection that any pool opens."""
    connections: set[PooledConnection] = set()
    connect = PooledConnection.connect.__func__  # type: ignore[attr-defined]

    async def remembered(cls: type[PooledConnection], /, *given: object, **named: object) -> PooledConnection:
        connection: PooledConnection = await connect(cls, *given, **named)
        connections.add(connection)
        return connection

    monkeypatch.setattr(PooledConnection, "connect", classmethod(remembered))
    return connections


@pytest.mark.parametrize("end", STEPS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_connection_comes_back_whichever_statement_its_block_ends_in(
    address: str, born: set[PooledConnection], way: Way, end: Callable[..., Awaitable[None]]
) -> None:
    async with pool(address) as database:
        ended = 0
        while ended <= SIZE:
            turns = 0
            while not await ended_by_itself(way(database), turns, end, born):
                turns += STEPS[end]
                ended += 1
                await until_healthy(database)
        await everything_is_back(database)


async def ended_by_itself(
    block: Awaitable[None], turns: int, end: Callable[..., Awaitable[None]], born: set[PooledConnection]
) -> bool:
    """Let a block run for so many turns of the loop and end it; true if it had ended before."""
    task = asyncio.ensure_future(block)
    for _ in range(turns):
        await asyncio.sleep(0)
    early = task.done()
    await end(task, born)
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert outcome is None or isinstance(outcome, EXPECTED), repr(outcome)
    assert not isinstance(outcome, psycopg.Error) or not isinstance(outcome, PoolTimeout), "the pool was used up"
    return early


async def until_healthy(database: Database) -> None:
    while not database.healthy:  # noqa: ASYNC110 — the supervisor probes in its own time, and announces nothing
        await asyncio.sleep(0.01)


async def everything_is_back(database: Database) -> None:
    """All connections can be borrowed at once, and then none is out."""
    # Those that broke while they were idle are replaced first, as they are after an outage.
    database.suspect("the test is over")
    await until_healthy(database)
    async with asyncio.timeout(60):
        await served(commits_a_connection, database)
        for way in (uses_autocommit, commits_a_session):
            await asyncio.gather(*(served(way, database) for _ in range(SIZE * 3)))
    held = await borrow_all(database)
    assert len({connection.info.backend_pid for connection in held}) == SIZE
    assert database.borrowed_connections == 0
    figures = database.stats()
    assert (figures["pool_size"], figures["pool_available"]) == (SIZE, SIZE)


async def served(way: Way, database: Database) -> None:
    """Borrow in this way, again until it works: a pool may have a short timeout, and a busy machine be slow; and
    callers that were cancelled while they waited count as waiting until the pool has its next connection."""
    while True:
        try:
            return await way(database)
        except (PoolTimeout, TooManyRequests):
            await asyncio.sleep(0.01)
        except DBAPIError as error:
            if not isinstance(error.orig, PoolTimeout | TooManyRequests):
                raise
            await asyncio.sleep(0.01)


async def borrow_all(database: Database) -> list[psycopg.AsyncConnection[tuple[object, ...]]]:
    """Borrow as many connections as there are, all at the same time, and give them back."""
    together = asyncio.Barrier(SIZE)

    async def borrow() -> psycopg.AsyncConnection[tuple[object, ...]]:
        async with database.connection() as connection:
            await together.wait()
            return connection

    async with asyncio.timeout(60):
        return await asyncio.gather(*(borrow() for _ in range(SIZE)))


# -- ends that PostgreSQL decides on ----------------------------------------------------------------------------------


TERMINATE = "SELECT pg_terminate_backend(%s, 5000)"


@asynccontextmanager
async def outsider(address: str) -> AsyncIterator[Callable[[int], Awaitable[object]]]:
    async with await psycopg.AsyncConnection.connect(address, autocommit=True) as connection:
        yield lambda pid: connection.execute(TERMINATE, [pid])


@pytest.mark.parametrize("then", ["SELECT 1", "SAVEPOINT here", None])
async def test_a_session_whose_backend_is_terminated_gives_its_connection_back(address: str, then: str | None) -> None:
    """In a statement, or, without one, in the COMMIT."""
    async with pool(address) as database, outsider(address) as terminate:
        for _ in range(SIZE + 2):
            await until_healthy(database)
            with pytest.raises(SQLAlchemyError):
                async with database.session() as session:
                    await terminate((await session.execute(text("SELECT pg_backend_pid()"))).scalar_one())
                    if then is not None:
                        await session.execute(text(then))
        await everything_is_back(database)


async def test_a_transaction_that_idles_too_long_gives_its_connection_back(address: str) -> None:
    async with pool(address) as database:
        for _ in range(SIZE + 2):
            await until_healthy(database)
            with pytest.raises(SQLAlchemyError):
                async with database.session() as session:
                    # For this transaction alone: a busy machine may let those that follow idle for longer.
                    await session.execute(text("SET LOCAL idle_in_transaction_session_timeout = '50ms'"))
                    pid = (await session.execute(text("SELECT pg_backend_pid()"))).scalar_one()
                    await until_gone(address, pid)
                    await session.execute(text("SELECT 1"))
        await everything_is_back(database)


async def until_gone(address: str, pid: int) -> None:
    async with await psycopg.AsyncConnection.connect(address, autocommit=True) as connection:
        here = "SELECT 1 FROM pg_stat_activity WHERE pid = %s"
        while await (await connection.execute(here, [pid])).fetchone():  # noqa: ASYNC110 — a backend ends silently
            await asyncio.sleep(0.01)


async def test_statements_that_take_too_long_give_their_connections_back(address: str) -> None:
    async with pool(address) as database:
        for _ in range(SIZE + 2):
            with pytest.raises(SQLAlchemyError, match="statement timeout"):
                async with database.session() as session:
                    await session.execute(text("SET LOCAL statement_timeout = '50ms'"))
                    await session.execute(text("SELECT pg_sleep(5)"))
        await everything_is_back(database)


async def test_a_pool_that_was_used_up_serves_again_when_its_callers_have_given_up(address: str) -> None:
    """Callers that time out or are cancelled while they wait for a connection leave nothing behind."""
    async with pool(address, pool_timeout=1.0) as database:
        async with asyncio.TaskGroup() as holders:
            release = asyncio.Event()

            async def hold() -> None:
                async with database.connection():
                    await release.wait()

            for _ in range(SIZE):
                holders.create_task(hold())
            waiting = [asyncio.ensure_future(commits_a_session(database)) for _ in range(SIZE * 3)]
            await asyncio.sleep(0)
            for one in waiting[::2]:
                one.cancel()
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(each, (SQLAlchemyError, PoolTimeout, asyncio.CancelledError)) for each in outcomes)
            release.set()
        await everything_is_back(database)


async def test_a_session_of_a_request_gives_its_connection_back_however_the_request_ends(
    own_postgres: Postgres,
) -> None:
    """Routes with `InSession` whose backends are terminated, and routes whose client leaves."""
    address = own_postgres.new_migrated_database()
    async with service(address, pool_min=SIZE, pool_max=SIZE) as running, outsider(address) as end:
        database = running.context.database
        held = running.app.state.held = asyncio.Queue[int]()
        for _ in range(SIZE * 2):
            await until_healthy(database)
            asking = asyncio.ensure_future(running.client.post("/trial/holds-a-session"))
            await end(await held.get())
            assert (await asking).status_code >= 500
        for _ in range(SIZE * 2):
            await until_healthy(database)
            asking = asyncio.ensure_future(running.client.post("/trial/holds-a-session"))
            await held.get()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until_healthy(database)
        for _ in range(20):
            assert (await running.client.get("/trial/database")).status_code == 200
        assert (await running.client.get("/health/ready")).status_code == 200


# -- a second connection for whoever holds one ------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["lock", "limit", "breaker", "once"])
@pytest.mark.parametrize("size", [2, 10])
async def test_requests_that_hold_all_sessions_still_get_locks_limits_breakers_and_keys(
    address: str, what: str, size: int
) -> None:
    """Sessions of callers never take the pool's last connections, so a statement of the fleet's own never waits for
    a caller that waits for it."""
    async with service(address, pool_min=1, pool_max=size, pool_timeout=20.0) as running:
        path = f"/trial/holds-a-session-and-takes/{what}"
        answers = await asyncio.gather(*(running.client.post(path) for _ in range(10)))
        assert [answer.status_code for answer in answers] == [200] * 10


async def test_a_pool_whose_sessions_are_all_held_still_serves_the_fleet_and_counts_who_waits(address: str) -> None:
    async with pool(address, pool_max=SIZE, pool_timeout=1.0) as database:
        release = asyncio.Event()

        async def hold() -> None:
            async with database.session() as session:
                await session.execute(text("SELECT 1"))
                await release.wait()

        holders = [asyncio.ensure_future(hold()) for _ in range(SIZE)]
        while database.stats()["requests_waiting"] != SIZE - session_limit(SIZE):  # noqa: ASYNC110 — a figure
            await asyncio.sleep(0)
        assert database.borrowed_connections == session_limit(SIZE)
        await uses_autocommit(database)
        await database.ping()
        outcomes = await asyncio.gather(*holders[session_limit(SIZE) :], return_exceptions=True)
        assert {type(each.orig) for each in outcomes if isinstance(each, DBAPIError)} == {PoolTimeout}
        assert database.stats()["requests_errors"] == SIZE - session_limit(SIZE)
        release.set()
        await asyncio.gather(*holders[: session_limit(SIZE)])
        await everything_is_back(database)


@pytest.mark.parametrize(("size", "sessions"), [(1, 1), (2, 1), (3, 2), (5, 4), (6, 2), (10, 5), (50, 43)])
def test_how_many_sessions_a_pool_of_some_size_lends_at_once(size: int, sessions: int) -> None:
    assert session_limit(size) == sessions
