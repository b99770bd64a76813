"""Checks, before anything is written, whether the database is suitable; each error says what to do.

A pooler at the direct address is recognised by its process id: it reports one at connect, and the backend that answers
has another. In transaction mode, session locks and LISTEN would be lost between two statements.

Whether the pool's address and the direct address lead to the same database is tested with a lock, the marker: a session
of one takes an advisory lock with a random key, and a session of the other must not get it. Every role may do that, and
a copy of the database does not have the lock.
"""

import ipaddress
import secrets
from dataclasses import dataclass, replace

import psycopg
from psycopg.rows import TupleRow

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

MIN_VERSION = 14

TAKE_MARKER = Statement("SELECT pg_advisory_lock(%s)")
# Free in every other database. It is held only until the end of this statement.
MARKER_IS_FREE = Statement("SELECT pg_try_advisory_xact_lock(%s)")


def new_marker() -> int:
    """Return a random key for the marker. It cannot collide with other locks of the fleet, whose keys are pairs."""
    return secrets.randbits(62)


@dataclass(frozen=True)
class Route:
    """The findings about the pool's address."""

    through_pooler: bool
    default_isolation: str
    # The addresses whose connections cross a network without TLS, password included.
    unencrypted: tuple[str, ...]


def check_direct(addresses: dsn.Addresses) -> None:
    """Raise unless the direct address leads to a writable PostgreSQL, 14 or newer, with no pooler in between."""
    try:
        with connect(addresses.direct) as connection:
            version = connection.info.server_version
            if version < MIN_VERSION * 10000:
                raise DatabaseTooOld(
                    f"PostgreSQL at {addresses.location} is version {version // 10000}; Flotilla needs {MIN_VERSION} "
                    f"or newer (it relies on idle_session_timeout to end a frozen instance's locks). Upgrade the server"
                )
            row = connection.execute("SELECT pg_backend_pid(), pg_is_in_recovery()").fetchone()
            assert row is not None
            if row[0] != connection.info.backend_pid:
                raise DirectConnectionRequired(
                    f"{addresses.location} is a connection pooler (such as PgBouncer), and a session's locks would not "
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
            marker = new_marker()
            direct.execute(TAKE_MARKER, [marker])
            return check_route(addresses, direct, marker)
    except psycopg.Error as error:
        raise translate(error, addresses) from error


def check_route(addresses: dsn.Addresses, direct: psycopg.Connection[TupleRow], marker: int) -> Route:
    try:
        with connect(addresses.pool) as pool:
            if pool.execute(MARKER_IS_FREE, [marker]).fetchone() == (True,):
                raise DatabasesDiffer(
                    f"DATABASE_URL ({dsn.location(addresses.pool)}) and DATABASE_DIRECT_URL ({addresses.location}) "
                    f"lead to different databases, or to different servers of one address: locks taken in one would "
                    f"guard nothing in the other. Let both lead to the same primary and database"
                )
            row = pool.execute("SELECT current_setting('default_transaction_isolation'), pg_backend_pid()").fetchone()
            assert row is not None
            isolation, pid = row
            if addresses.pooled and isolation != "read committed":
                raise IsolationUnsupported(
                    f"sessions behind {dsn.location(addresses.pool)} have default_transaction_isolation = "
                    f"'{isolation}', and through a pooler Flotilla cannot set it: ALTER ROLE … SET "
                    f"default_transaction_isolation = 'read committed', and let the pooler open new sessions"
                )
            names = {dsn.location(addresses.pool): pool, addresses.location: direct}
            unencrypted = tuple(name for name, connection in names.items() if crosses_unencrypted(connection))
            return Route(pid != pool.info.backend_pid, isolation, unencrypted)
    except psycopg.Error as error:
        raise translate(error, replace(addresses, direct=addresses.pool)) from error


def connect(address: str) -> psycopg.Connection[TupleRow]:
    return psycopg.connect(address, application_name="flotilla preflight", autocommit=True, prepare_threshold=None)


def crosses_unencrypted(connection: psycopg.Connection[TupleRow]) -> bool:
    """Whether the connection leads to another machine without TLS."""
    address = connection.info.hostaddr
    return bool(address) and not ipaddress.ip_address(address).is_loopback and not connection.pgconn.ssl_in_use


def translate(error: psycopg.Error, addresses: dsn.Addresses) -> DatabaseError:
    """Return the error of a failed connection with advice on what to do."""
    text = redact(" ".join(str(error).split()))
    if "session is read-only" in text or "server is in hot standby mode" in text or error.sqlstate == "25006":
        return read_only(addresses)
    if "unsupported startup parameter" in text:
        return DirectConnectionRequired(
            f"{addresses.location} is a connection pooler ({text}): set DATABASE_DIRECT_URL to PostgreSQL itself; "
            f"DATABASE_URL may stay on the pooler"
        )
    # Not a failed connection, a refused login, an unknown database, too many connections, or a shutdown.
    if error.sqlstate and not error.sqlstate.startswith(("08", "28", "3D", "53", "57")):
        return DatabaseError(f"PostgreSQL at {addresses.location} rejected a statement of Flotilla: {text}")
    return DatabaseUnreachable(
        f"cannot connect to PostgreSQL at {addresses.location}: {text}. Check that it runs, that DATABASE_URL names "
        f"the right host, port, user and database, and that this host may reach it"
    )


def read_only(addresses: dsn.Addresses) -> DatabaseReadOnly:
    return DatabaseReadOnly(
        f"PostgreSQL at {addresses.location} is read-only (a standby, or a demoted primary): point DATABASE_URL at the "
        f"primary, or name all hosts (host=a,b) and let target_session_attrs=read-write find it"
    )
