"""A direct session: one connection to PostgreSQL itself, used by one thread. Both sides notice when it ends.

Each side has a timer. The server's `idle_session_timeout` (and its equivalent inside a transaction) ends the
session, and with it every lock that it holds, when the client has sent nothing for the lease. This also works for a
frozen process and a cut network, which keepalives alone do not detect. The client waits for an answer only as long as
its patience, which is shorter: it stops acting before the server releases its locks.

    failure                          noticed by           after
    process killed                   server               at once (the socket closes)
    process frozen                   server               lease
    network cut                      client, then server  patience (TCP user timeout), then lease
    server or its host hangs         client               patience
    backend terminated               client               at once

Not guaranteed: anything behind a pooler in transaction mode. `preflight` refuses that.
"""

import os
import socket
from typing import Any

import psycopg
from psycopg.rows import TupleRow

from app.fleet.db.dsn import READ_COMMITTED, with_options

LEASE = 5.0
PATIENCE = 2.5


class DirectSession(psycopg.Connection[TupleRow]):
    """A synchronous connection that waits only as long as its patience and that any thread can hang up."""

    patience: float | None = PATIENCE

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        try:
            return super().wait(gen, interval, self.patience if timeout is None else timeout)
        except psycopg.errors._WaitTimeout:  # noqa: SLF001 — psycopg names its own timeout so, and raises nothing else
            # The answer may still arrive, so the session cannot be used for another statement.
            self.close()
            raise psycopg.OperationalError(f"no answer from PostgreSQL within {self.patience} s") from None

    def hang_up(self) -> None:
        """End the session from any thread: the thread that waits on it gets an error at once."""
        try:
            with socket.socket(fileno=os.dup(self.pgconn.socket)) as wire:
                wire.shutdown(socket.SHUT_RDWR)
        except (OSError, psycopg.OperationalError):
            pass  # it is closed already


def open_session(
    address: str, *, application: str, lease: float | None = LEASE, autocommit: bool = True
) -> DirectSession:
    """Open a direct session. With a lease, the server ends it after that many seconds without a statement."""
    lease_ms = int(lease * 1000) if lease else 0
    options: dict[str, str | int] = {
        "default_transaction_isolation": READ_COMMITTED,
        "idle_session_timeout": lease_ms,
        "idle_in_transaction_session_timeout": lease_ms,
        "client_connection_check_interval": 500,
        "tcp_keepalives_idle": 2,
        "tcp_keepalives_interval": 1,
        "tcp_keepalives_count": 3,
        "statement_timeout": 0,
        "lock_timeout": 0,
        # An acknowledged commit survives a crash of the server, whatever the server's default is.
        "synchronous_commit": "on",
    }
    conninfo = with_options(address, application=application, **options)
    session = DirectSession.connect(conninfo, autocommit=True, prepare_threshold=None)
    if session.info.server_version >= 170000:
        session.execute("SET transaction_timeout = 0")
    session.autocommit = autocommit
    return session
