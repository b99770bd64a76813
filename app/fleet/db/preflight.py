"""Is this database one we can be safe on? Asked before anything is written, answered with what to do.

A pooler in front of the direct address is recognised by the process id it reports at connect, which is not the one of
the backend that answers: in transaction mode every session lock and LISTEN would be lost between two statements.

That the pool's address and the direct one lead to the same database is seen from a lock: a session of one takes an
advisory lock of a random number, and a session of the other cannot get it. Any role may do that, and no copy of the
database has the lock.
"""

import ipaddress
import secrets
from dataclasses import dataclass, replace

import psycopg
from psycopg.rows import TupleRow, tuple_row

from app.fleet.db import dsn
from app.fleet.db.namespace import Statement
from app.fleet.errors import (
    DatabaseError,
    DatabaseReadOnly,
    DatabasesDiffer,
    DatabaseTooOld,
    DatabaseUnreachable,
    DirectConnectionRequired,
    IsolationUnsupported,
)
from app.fleet.telemetry.redaction import redact

OLDEST = 14

TAKE_MARKER = Statement("SELECT pg_advisory_lock(%s)")
# Free in every other database, and taken for no longer than this statement.
MARKER_IS_FREE = Statement("SELECT pg_try_advisory_xact_lock(%s)")


def new_marker() -> int:
    """Draw the number of an advisory lock that no other session has. The fleet's other locks are pairs of numbers."""
    return secrets.randbits(62)


@dataclass(frozen=True)
class Route:
    """How the pool's address leads to PostgreSQL."""

    through_pooler: bool
    default_isolation: str
    # Where a password and all data cross a network without TLS.
    unencrypted: tuple[str, ...]


def check_direct(addresses: dsn.Addresses) -> None:
    """Raise unless the direct address leads to a writable PostgreSQL, 14 or newer, with no pooler in between."""
    try:
        with psycopg.connect(addresses.direct, application_name="flotilla preflight", autocommit=True) as connection:
            version = connection.info.server_version
            if version < OLDEST * 10000:
                raise DatabaseTooOld(
                    f"PostgreSQL at {addresses.place} is version {version // 10000}; Flotilla needs {OLDEST} or newer "
                    f"(it relies on idle_session_timeout to end a frozen instance's locks). Upgrade the server"
                )
            row = connection.execute("SELECT pg_backend_pid(), pg_is_in_recovery()").fetchone()
            assert row is not None
            if row[0] != connection.info.backend_pid:
                raise DirectConnectionRequired(
                    f"{addresses.place} is a connection pooler (PgBouncer or alike), and a session's locks would not "
                    f"survive it: set DATABASE_DIRECT_URL to PostgreSQL itself; DATABASE_URL may stay on the pooler"
                )
            if row[1] or connection.execute("SHOW transaction_read_only").fetchone() == ("on",):
                raise read_only(addresses)
    except psycopg.Error as error:
        raise translate(error, addresses) from error


def check_pool(addresses: dsn.Addresses) -> Route:
    """Raise unless both addresses lead to the same database, and the pool's sessions can be READ COMMITTED."""
    try:
        with connect(addresses.direct) as direct:
            mark = new_marker()
            direct.execute(TAKE_MARKER, [mark])
            return check_route(addresses, direct, mark)
    except psycopg.Error as error:
        raise translate(error, addresses) from error


def check_route(addresses: dsn.Addresses, direct: psycopg.Connection[TupleRow], mark: int) -> Route:
    try:
        with connect(addresses.pool) as pool:
            if pool.execute(MARKER_IS_FREE, [mark]).fetchone() == (True,):
                raise DatabasesDiffer(
                    f"DATABASE_URL ({dsn.place(addresses.pool)}) and DATABASE_DIRECT_URL ({addresses.place}) lead to "
                    f"different databases, or to different servers of one address: locks taken in one would guard "
                    f"nothing in the other. Let both lead to the same primary and database"
                )
            row = pool.execute("SELECT current_setting('default_transaction_isolation'), pg_backend_pid()").fetchone()
            assert row is not None
            isolation, pid = row
            if addresses.pooled and isolation != "read committed":
                raise IsolationUnsupported(
                    f"sessions behind {dsn.place(addresses.pool)} have default_transaction_isolation = '{isolation}', "
                    f"and through a pooler Flotilla cannot set it: ALTER ROLE … SET default_transaction_isolation = "
                    f"'read committed', and let the pooler open new sessions"
                )
            names = {dsn.place(addresses.pool): pool, addresses.place: direct}
            unencrypted = tuple(name for name, connection in names.items() if crosses_unencrypted(connection))
            return Route(pid != pool.info.backend_pid, isolation, unencrypted)
    except psycopg.Error as error:
        raise translate(error, replace(addresses, direct=addresses.pool)) from error


def connect(address: str) -> psycopg.Connection[TupleRow]:
    return psycopg.connect(
        address, application_name="flotilla preflight", autocommit=True, prepare_threshold=None, row_factory=tuple_row
    )


def crosses_unencrypted(connection: psycopg.Connection[TupleRow]) -> bool:
    """Whether it leaves this machine without TLS."""
    address = connection.info.hostaddr
    return bool(address) and not ipaddress.ip_address(address).is_loopback and not connection.pgconn.ssl_in_use


def translate(error: psycopg.Error, addresses: dsn.Addresses) -> DatabaseError:
    """Turn a failed connection into an error that says what to do."""
    text = redact(" ".join(str(error).split()))
    if "session is read-only" in text or "server is in hot standby mode" in text or error.sqlstate == "25006":
        return read_only(addresses)
    if "unsupported startup parameter" in text:
        return DirectConnectionRequired(
            f"{addresses.place} is a connection pooler ({text}): set DATABASE_DIRECT_URL to PostgreSQL itself; "
            f"DATABASE_URL may stay on the pooler"
        )
    if error.sqlstate and not shows_no_connection(error.sqlstate):
        return DatabaseError(f"PostgreSQL at {addresses.place} refused a statement of ours: {text}")
    return DatabaseUnreachable(
        f"cannot connect to PostgreSQL at {addresses.place}: {text}. Check that it runs, that DATABASE_URL names the "
        f"right host, port, user and database, and that this host may reach it"
    )


def shows_no_connection(sqlstate: str) -> bool:
    """Connection errors, refused logins, unknown databases, too many connections, a server shutting down."""
    return sqlstate.startswith(("08", "28", "3D", "53", "57"))


def read_only(addresses: dsn.Addresses) -> DatabaseReadOnly:
    return DatabaseReadOnly(
        f"PostgreSQL at {addresses.place} is read-only (a standby, or a demoted primary): point DATABASE_URL at the "
        f"primary, or name all hosts (host=a,b) and let target_session_attrs=read-write find it"
    )
