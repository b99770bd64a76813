"""Real PostgreSQL servers for tests: on TCP, with databases made per test, and with everything that can go wrong."""

import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psycopg
from psycopg.rows import TupleRow

from app.fleet.db.embedded import Server
from app.fleet.db.migrations import migrate
from app.fleet.db.namespace import Namespace

Answer = TypeVar("Answer")

# Without fsync, because these servers crash and the machine does not: what was written is there after any kill. Who
# measures, or means durability, asks for it.
CONFIGURATION = """
listen_addresses = '127.0.0.1'
fsync = off
max_connections = 400
log_lock_waits = on
wal_level = replica
hot_standby = on
"""


# Below the ports that the system gives to outgoing connections: one of those may take a port between the look and its
# use, and did.
PORTS = range(10_000, 32_000)


def free_port(in_a_row: int = 1) -> int:
    """The first of so many ports that nobody uses; at random, because tests look for them at the same time."""
    while True:
        first = PORTS.start + secrets.randbelow(len(PORTS) - in_a_row)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + in_a_row):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def eventually(condition: Callable[[], Answer | None], *, within: float = 20.0, every: float = 0.02) -> Answer:
    """Wait until something is true and return it. The bound is generous: it is for hangs, not for speed."""
    deadline = time.monotonic() + within
    while True:
        if answer := condition():
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {within} s: {condition}")
        time.sleep(every)


class Postgres(Server):
    """A server of its own, on a TCP port that stays the same over restarts."""

    def __init__(self, home: Path, *, version: int = 18) -> None:
        super().__init__(home, version=version)
        self.port = free_port()
        self._migrated: str | None = None

    def up(self, configuration: str = "") -> None:
        self.create(CONFIGURATION + configuration)
        self.start(f"-p {self.port}")

    def start_again(self) -> None:
        self.start(f"-p {self.port}")

    def address_of(self, database: str = "postgres", user: str = "postgres") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    @contextmanager
    def session(self, database: str = "postgres") -> Iterator[psycopg.Connection[TupleRow]]:
        with psycopg.connect(self.address_of(database), autocommit=True) as connection:
            yield connection

    def new_database(self, *, like: str = "template1") -> str:
        """Make a database nobody else uses, and return its address."""
        name = f"t_{secrets.token_hex(6)}"
        with self.session() as session:
            session.execute(f'CREATE DATABASE "{name}" TEMPLATE "{like}"')
        return self.address_of(name)

    def new_migrated_database(self) -> str:
        """Make one whose namespace has its tables already: they are copied, which takes a tenth of making them."""
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
        """Make a streaming standby of this server and start it."""
        other = Postgres(home, version=self.version)
        other.home.mkdir(parents=True)
        other.open_ways()
        other._give(other.home)
        source = f"host=127.0.0.1 port={self.port} user=postgres"
        self.command("pg_basebackup", "-R", "-c", "fast", "-D", str(other.data), "-d", source)
        other.data.chmod(0o700)
        other.start_again()
        return other

    def promote(self) -> None:
        self.command("pg_ctl", "promote", "-w", "-D", str(self.data))

    def destroy(self) -> None:
        if self.data.exists():
            self.stop("immediate")
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.rmtree(self.sockets, ignore_errors=True)


@contextmanager
def server(version: int = 18, configuration: str = "") -> Iterator[Postgres]:
    """Run a PostgreSQL for as long as the block lasts."""
    running = Postgres(Path(tempfile.mkdtemp(prefix="flotilla-pg-")) / "home", version=version)
    try:
        running.up(configuration)
        yield running
    finally:
        running.destroy()
        shutil.rmtree(running.home.parent, ignore_errors=True)
