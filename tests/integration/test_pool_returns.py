"""Each borrowed connection returns to the pool, however the block that borrowed it ends.

Every way to borrow is combined with every way to end. Each end is tried after each number of iterations of the event
loop, so it happens in each phase of a block: the wait for a connection, BEGIN, the statements, COMMIT or ROLLBACK, and
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
from tests.support.runs import soon
from tests.support.service import is_ready, service

pytestmark = pytest.mark.anyio

# Large enough for dedicated connections, small enough that lost connections would soon exhaust the pool.
SIZE = 6


class Refused(Exception):
    """Raised by a block itself."""


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


async def loses_its_connection(_: "asyncio.Task[None]", opened: set[PooledConnection]) -> None:
    shut_sockets(opened)


async def loses_its_connection_and_is_cancelled(task: "asyncio.Task[None]", opened: set[PooledConnection]) -> None:
    shut_sockets(opened)
    await asyncio.sleep(0)
    task.cancel()


def shut_sockets(connections: set[PooledConnection]) -> None:
    """Shut down their sockets without the knowledge of psycopg, as a crash of the server does."""
    for connection in connections:
        if not connection.pgconn.status:
            with socket.socket(fileno=os.dup(connection.pgconn.socket)) as wire, suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)


# Each end, and the step in iterations between two tries. A lost connection makes the pool reconnect each time.
STEPS: dict[Callable[..., Awaitable[None]], int] = {
    is_cancelled: 1,
    is_cancelled_twice: 2,
    loses_its_connection: 5,
    loses_its_connection_and_is_cancelled: 5,
}
# The errors that a block may raise at such an end. Any other error is a defect.
EXPECTED = (Refused, psycopg.Error, SQLAlchemyError, DatabaseAway, asyncio.CancelledError)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> set[PooledConnection]:
    """Record all connections that pools open."""
    connections: set[PooledConnection] = set()
    connect = PooledConnection.connect.__func__  # type: ignore[attr-defined]

    async def record(cls: type[PooledConnection], /, *given: object, **named: object) -> PooledConnection:
        connection: PooledConnection = await connect(cls, *given, **named)
        connections.add(connection)
        return connection

    monkeypatch.setattr(PooledConnection, "connect", classmethod(record))
    return connections


@pytest.mark.parametrize("end", STEPS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_connection_is_returned_in_whichever_statement_its_block_ends(
    address: str, opened: set[PooledConnection], way: Way, end: Callable[..., Awaitable[None]]
) -> None:
    async with pool(address) as database:
        ended = 0
        while ended <= SIZE:
            turns = 0
            while not await ended_by_itself(way(database), turns, end, opened):
                turns += STEPS[end]
                ended += 1
                await wait_until_healthy(database)
        await check_all_are_returned(database)


async def ended_by_itself(
    block: Awaitable[None], turns: int, end: Callable[..., Awaitable[None]], opened: set[PooledConnection]
) -> bool:
    """Run a block for this many iterations of the loop and end it; return True if it had ended before."""
    task = asyncio.ensure_future(block)
    for _ in range(turns):
        await asyncio.sleep(0)
    early = task.done()
    await end(task, opened)
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert outcome is None or isinstance(outcome, EXPECTED), repr(outcome)
    assert not isinstance(outcome, psycopg.Error) or not isinstance(outcome, PoolTimeout), "the pool was exhausted"
    return early


async def wait_until_healthy(database: Database) -> None:
    while not database.healthy:  # noqa: ASYNC110 — the supervisor sends no signal
        await asyncio.sleep(0.01)


async def check_all_are_returned(database: Database) -> None:
    """Check that all connections can be borrowed at once, and that none is borrowed afterwards."""
    # Connections that broke while they were idle are replaced first, as after an outage.
    database.suspect("the test is over")
    await wait_until_healthy(database)
    async with asyncio.timeout(60):
        await succeed(commits_a_connection, database)
        for way in (uses_autocommit, commits_a_session):
            await asyncio.gather(*(succeed(way, database) for _ in range(SIZE * 3)))
    held = await borrow_all(database)
    assert len({connection.info.backend_pid for connection in held}) == SIZE
    assert database.borrowed_connections == 0
    figures = database.stats()
    assert (figures["pool_size"], figures["pool_available"]) == (SIZE, SIZE)


async def succeed(way: Way, database: Database) -> None:
    """Borrow in this way, and repeat it until it succeeds.

    A pool may have a short timeout, and a busy machine may be slow. And callers that were cancelled while they waited
    count as waiting until the pool has its next connection.
    """
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
    """Borrow all connections at the same time, and return them."""
    together = asyncio.Barrier(SIZE)

    async def borrow() -> psycopg.AsyncConnection[tuple[object, ...]]:
        async with database.connection() as connection:
            await together.wait()
            return connection

    async with asyncio.timeout(60):
        return await asyncio.gather(*(borrow() for _ in range(SIZE)))


# -- ends caused by PostgreSQL ----------------------------------------------------------------------------------------


TERMINATE = "SELECT pg_terminate_backend(%s, 60000)"


@asynccontextmanager
async def open_terminator(address: str) -> AsyncIterator[Callable[[int], Awaitable[object]]]:
    async with await psycopg.AsyncConnection.connect(address, autocommit=True) as connection:
        yield lambda pid: connection.execute(TERMINATE, [pid])


@pytest.mark.parametrize("then", ["SELECT 1", "SAVEPOINT here", None])
async def test_a_session_whose_backend_is_terminated_returns_its_connection(address: str, then: str | None) -> None:
    """The error is raised by the statement, or, without a statement, by the COMMIT."""
    async with pool(address) as database, open_terminator(address) as terminate:
        for _ in range(SIZE + 2):
            await wait_until_healthy(database)
            with pytest.raises(SQLAlchemyError):
                async with database.session() as session:
                    await terminate((await session.execute(text("SELECT pg_backend_pid()"))).scalar_one())
                    if then is not None:
                        await session.execute(text(then))
        await check_all_are_returned(database)


async def test_a_transaction_that_is_idle_for_too_long_returns_its_connection(address: str) -> None:
    async with pool(address) as database:
        for _ in range(SIZE + 2):
            await wait_until_healthy(database)
            with pytest.raises(SQLAlchemyError):
                async with database.session() as session:
                    # Only for this transaction: on a busy machine, later transactions may be idle for longer.
                    await session.execute(text("SET LOCAL idle_in_transaction_session_timeout = '50ms'"))
                    pid = (await session.execute(text("SELECT pg_backend_pid()"))).scalar_one()
                    await wait_until_gone(address, pid)
                    await session.execute(text("SELECT 1"))
        await check_all_are_returned(database)


async def wait_until_gone(address: str, pid: int) -> None:
    async with await psycopg.AsyncConnection.connect(address, autocommit=True) as connection:
        here = "SELECT 1 FROM pg_stat_activity WHERE pid = %s"
        while await (await connection.execute(here, [pid])).fetchone():  # noqa: ASYNC110 — a backend sends no signal at its end
            await asyncio.sleep(0.01)


async def test_statements_that_time_out_return_their_connections(address: str) -> None:
    async with pool(address) as database:
        for _ in range(SIZE + 2):
            with pytest.raises(SQLAlchemyError, match="statement timeout"):
                async with database.session() as session:
                    await session.execute(text("SET LOCAL statement_timeout = '50ms'"))
                    await session.execute(text("SELECT pg_sleep(5)"))
        await check_all_are_returned(database)


async def test_an_exhausted_pool_serves_again_after_its_waiting_callers_have_given_up(address: str) -> None:
    """Callers that time out or are cancelled while they wait for a connection cost the pool nothing."""
    async with pool(address) as database:
        async with asyncio.TaskGroup() as holders:
            release, all_held = asyncio.Event(), asyncio.Barrier(SIZE + 1)

            async def hold() -> None:
                async with database.connection():
                    await all_held.wait()
                    await release.wait()

            for _ in range(SIZE):
                holders.create_task(hold())
            await all_held.wait()
            # Only from now on: a holder may need longer to open its connection.
            database._pool.timeout = 1.0
            waiting = [asyncio.ensure_future(commits_a_session(database)) for _ in range(SIZE * 3)]
            await asyncio.sleep(0)
            for one in waiting[::2]:
                one.cancel()
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(each, (SQLAlchemyError, PoolTimeout, asyncio.CancelledError)) for each in outcomes)
            release.set()
        await check_all_are_returned(database)


async def test_a_session_of_a_request_returns_its_connection_however_the_request_ends(
    own_postgres: Postgres,
) -> None:
    """Routes with `InSession` whose backends are terminated, and routes whose client leaves."""
    address = own_postgres.new_migrated_database()
    async with service(address, pool_min=SIZE, pool_max=SIZE) as running, open_terminator(address) as end:
        database = running.context.database
        held = running.app.state.held = asyncio.Queue[int]()
        for _ in range(SIZE * 2):
            await wait_until_healthy(database)
            asking = asyncio.ensure_future(running.client.post("/trial/holds-a-session"))
            await end(await held.get())
            assert (await asking).status_code >= 500
        for _ in range(SIZE * 2):
            await wait_until_healthy(database)
            asking = asyncio.ensure_future(running.client.post("/trial/holds-a-session"))
            await held.get()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await wait_until_healthy(database)
        for _ in range(20):
            assert (await running.client.get("/trial/database")).status_code == 200
        await soon(lambda: is_ready(running))


# -- a second connection for a caller that holds one ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["lock", "limit", "breaker", "once"])
@pytest.mark.parametrize("size", [2, 10])
async def test_requests_that_hold_all_sessions_still_get_locks_limits_breakers_and_keys(
    address: str, what: str, size: int
) -> None:
    """Sessions of callers never take the last connections of the pool.

    So a statement of the template never waits for a caller that waits for that statement.
    """
    async with service(address, pool_min=1, pool_max=size) as running:
        path = f"/trial/holds-a-session-and-takes/{what}"
        answers = await asyncio.gather(*(running.client.post(path) for _ in range(10)))
        assert [answer.status_code for answer in answers] == [200] * 10


async def test_a_pool_whose_sessions_are_all_held_still_serves_statements_of_the_template(address: str) -> None:
    limit, others = session_limit(SIZE), SIZE - session_limit(SIZE)
    async with pool(address, pool_max=SIZE) as database:
        release, all_held = asyncio.Event(), asyncio.Barrier(limit + 1)

        async def hold() -> None:
            async with database.session() as session:
                await session.execute(text("SELECT 1"))
                await all_held.wait()
                await release.wait()

        holders = [asyncio.ensure_future(hold()) for _ in range(limit)]
        await all_held.wait()
        waiting = [asyncio.ensure_future(commits_a_session(database)) for _ in range(others)]
        while database.stats()["requests_waiting"] != others:  # noqa: ASYNC110 — a figure
            await asyncio.sleep(0)
        assert database.borrowed_connections == limit
        await uses_autocommit(database)
        await database.ping()
        assert database.stats()["requests_waiting"] == others
        # Only from now on: until here, on a busy machine, all the callers needed their time.
        database._slots._timeout = 0.5
        late = [asyncio.ensure_future(commits_a_session(database)) for _ in range(others)]
        outcomes = await asyncio.gather(*late, return_exceptions=True)
        assert [type(each.orig) for each in outcomes if isinstance(each, DBAPIError)] == [PoolTimeout] * others
        assert database.stats()["requests_errors"] == others
        release.set()
        await asyncio.gather(*holders, *waiting)
        await check_all_are_returned(database)


@pytest.mark.parametrize(("size", "sessions"), [(1, 1), (2, 1), (3, 2), (5, 4), (6, 2), (10, 5), (50, 43)])
def test_the_number_of_sessions_at_a_time_follows_from_the_size_of_the_pool(size: int, sessions: int) -> None:
    assert session_limit(size) == sessions
