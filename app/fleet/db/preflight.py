"""Is this database one we can be safe on? Asked before anything is written, answered with what to do.

A pooler in front of the direct address is recognised by the process id it reports at connect, which is not the one of
the backend that answers: in transaction mode every session lock and LISTEN would be lost between two statements.
"""

import psycopg

from app.fleet.db import dsn
from app.fleet.errors import (
    DatabaseError,
    DatabaseReadOnly,
    DatabaseTooOld,
    DatabaseUnreachable,
    DirectConnectionRequired,
)
from app.fleet.telemetry.redaction import redact

OLDEST = 14


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
