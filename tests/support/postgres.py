"""Real PostgreSQL servers for tests: on TCP, with a database per test; a test can stop, break or promote them."""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psycopg
from psycopg.rows import TupleRow

from app.fleet.db.embedded import Server, exclusive_access
from app.fleet.db.migrations import migrate
from app.fleet.db.namespace import Namespace

Answer = TypeVar("Answer")

# Without fsync: these servers are killed, but the machine does not crash, so no write is lost. Benchmarks, and tests of
# durability, switch it on.
CONFIGURATION = """
listen_addresses = '127.0.0.1'
fsync = off
max_connections = 400
log_lock_waits = on
wal_level = replica
hot_standby = on
"""
# The folder with a prepared server of each version, shared by all processes of a test run.
PREPARED = "TEST_SERVERS"
# The migrated database of a prepared server.
MIGRATED = "migrated"


# Below the ports of outgoing connections: such a connection could take a port between the check and its use.
PORTS = range(10_000, 32_000)


def free_port(in_a_row: int = 1) -> int:
    """Return the first of some consecutive free ports. No other test process gets them while this process lives."""
    while True:
        first = PORTS.start + secrets.randbelow(len(PORTS) - in_a_row)
        # A socket name is exclusive to one process, and is released at its end.
        names = [socket.socket(socket.AF_UNIX) for _ in range(in_a_row)]
        with ExitStack() as stack, suppress(OSError):
            for port, name in enumerate(names, first):
                name.bind(f"\0flotilla-test-port-{port}")
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            for name in names:
                # The sockets stay open until this process ends.
                name.detach()
            return first
        for name in names:
            name.close()


# Detects hangs, not slowness: longer than any condition takes on a busy machine.
BOUND = 60.0


def eventually(condition: Callable[[], Answer | None], *, within: float = BOUND, every: float = 0.05) -> Answer:
    """Wait until the condition is met, and return its value."""
    deadline = time.monotonic() + within
    while True:
        if answer := condition():
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {within} s: {condition}")
        time.sleep(every)


class Postgres(Server):
    """A server on a TCP port that stays the same over restarts."""

    def __init__(self, home: Path, *, version: int = 18) -> None:
        super().__init__(home, version=version)
        self.port = free_port()
        self._migrated: str | None = None

    def up(self, configuration: str = "") -> None:
        if prepared := os.environ.get(PREPARED):
            self._copy(prepare(Path(prepared), self.version))
            self._migrated = MIGRATED
        else:
            self.create(CONFIGURATION)
        with (self.data / "postgresql.conf").open("a") as settings:
            settings.write(configuration)
        self.start(f"-p {self.port}")

    def start_again(self) -> None:
        self.start(f"-p {self.port}")

    def address_of(self, database: str = "postgres", user: str = "postgres") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    @contextmanager
    def session(self, database: str = "postgres") -> Iterator[psycopg.Connection[TupleRow]]:
        with psycopg.connect(self.address_of(database), autocommit=True) as connection:
            yield connection

    def new_database(self, *, like: str = "template1", named: str | None = None) -> str:
        """Create a database for one test, and return its address."""
        name = named or f"t_{secrets.token_hex(6)}"
        with self.session() as session:
            # The other strategy writes every page to the log of transactions, which takes longer.
            session.execute(f'CREATE DATABASE "{name}" TEMPLATE "{like}" STRATEGY FILE_COPY')
        return self.address_of(name)

    def new_migrated_database(self) -> str:
        """Create a migrated database. It is copied, which takes a tenth of the time of a migration."""
        if self._migrated is None:
            address = self.new_database()
            migrate(address, Namespace("flotilla"))
            self._migrated = address.rpartition("/")[2]
        return self.new_database(like=self._migrated)

    def drop(self, address: str) -> None:
        name = address.rpartition("/")[2]
        with self.session() as session:
            session.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def standby(self, home: Path) -> "Postgres":
        """Create a streaming standby of this server, and start it."""
        other = Postgres(home, version=self.version)
        other.home.mkdir(parents=True)
        other.grant_access()
        other._change_owner(other.home)
        source = f"host=127.0.0.1 port={self.port} user=postgres"
        self.command("pg_basebackup", "-R", "-c", "fast", "-D", str(other.data), "-d", source)
        other.data.chmod(0o700)
        other.start_again()
        return other

    def set(self, name: str, value: str) -> None:
        """Change a setting, and wait until new sessions have it."""
        with self.session() as session:
            session.execute(f"ALTER SYSTEM SET {name} = {value}")
            session.execute("SELECT pg_reload_conf()")

        def is_set() -> bool:
            # The server has read its configuration and signalled all sessions before it starts this one.
            with self.session() as session:
                return session.execute(f"SHOW {name}").fetchone() == (value,)

        eventually(is_set)

    def promote(self) -> None:
        self.command("pg_ctl", "promote", "-w", "-D", str(self.data))

    def destroy(self) -> None:
        if self.data.exists():
            self.stop("immediate")
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.rmtree(self.sockets, ignore_errors=True)

    def _copy(self, prepared: Server) -> None:
        """Copy another server's files, which is faster than `initdb`."""
        self.home.mkdir(parents=True)
        self.grant_access()
        subprocess.run(["cp", "-a", "--reflink=auto", str(prepared.data), str(self.data)], check=True)


def prepare(folder: Path, version: int) -> Server:
    """Create a server with a migrated database, once for all processes of a test run."""
    made = Postgres(folder / f"postgresql-{version}", version=version)
    with exclusive_access(made.home):
        done = made.home / "done"
        if not done.exists():
            made.create(CONFIGURATION)
            made.start_again()
            migrate(made.new_database(named=MIGRATED), Namespace("flotilla"))
            made.stop()
            done.touch()
    return made


@contextmanager
def server(version: int = 18, configuration: str = "") -> Iterator[Postgres]:
    """Run a PostgreSQL server for the duration of the block."""
    running = Postgres(Path(tempfile.mkdtemp(prefix="flotilla-pg-")) / "home", version=version)
    try:
        running.up(configuration)
        yield running
    finally:
        running.destroy()
        shutil.rmtree(running.home.parent, ignore_errors=True)
