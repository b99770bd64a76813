"""Databases for tests: a PostgreSQL server for each run of the tests, and a new, migrated database for each test.

Without an address, the server is the embedded one. Its files are prepared once, with a migrated database, under
`.flotilla/testing`, and prepared again when a migration changes. Each run of the tests has a copy of them in a
temporary folder, which all its processes share (pytest-xdist). The last process stops the server and deletes the copy.
With an address, the databases are created on that server.

A test's database is a copy of the migrated one, which takes a tenth of the time of a migration.

Nothing on these servers is durable: they are for tests.
"""

import fcntl
import hashlib
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import psycopg

from app.fleet.db.embedded import Server, exclusive_access
from app.fleet.db.migrations import ROOT, migrate
from app.fleet.db.namespace import Namespace
from app.fleet.errors import SettingsError

PREPARED = ROOT / ".flotilla" / "testing"
MIGRATIONS = ROOT / "alembic"
CONFIGURATION = """
listen_addresses = ''
max_connections = 300
fsync = off
full_page_writes = off
autovacuum = off
"""
NAMESPACE = Namespace("flotilla")
# A socket's path has at most 107 bytes, and its file's name has 14.
MAX_SOCKETS_LENGTH = 90


class TemporaryServer(Server):
    """A server whose socket is beside its files: the temporary folder is not the same for all processes."""

    @property
    def sockets(self) -> Path:
        own = self.home / "socket"
        return own if len(str(own)) <= MAX_SOCKETS_LENGTH else super().sockets

    def address_of(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={quote(str(self.sockets), safe='/')}"


@dataclass(frozen=True)
class Databases:
    """Creates databases by copying a migrated one."""

    # The address of a server, with this database, to which a session that creates others connects.
    address: str
    template: str

    def create(self) -> str:
        """Create a migrated database, and return its address."""
        name = f"test_{secrets.token_hex(6)}"
        with psycopg.connect(self.address, autocommit=True) as session:
            session.execute(f'CREATE DATABASE "{name}" TEMPLATE "{self.template}"')
        return with_database(self.address, name)

    def drop(self, address: str) -> None:
        with psycopg.connect(self.address, autocommit=True) as session:
            session.execute(f'DROP DATABASE IF EXISTS "{urlsplit(address).path[1:]}" WITH (FORCE)')


@contextmanager
def databases(run: str, address: str | None = None) -> Iterator[Databases]:
    """Provide databases for one run of the tests, which all its processes share; `run` is its name."""
    template = f"template_{run}"
    if address is not None:
        with_database(address, template)  # raises if the address has another form
    folder = Path(tempfile.gettempdir()) / f"flotilla-testing-{run}"
    folder.mkdir(exist_ok=True)
    # PostgreSQL does not run as root, and must be able to enter the folder.
    folder.chmod(0o711)
    server = TemporaryServer(folder / "postgresql")
    with (folder / "users").open("w") as users:
        with exclusive_access(PREPARED):
            fcntl.flock(users, fcntl.LOCK_SH)
            if address is None:
                start(server)
            else:
                migrate_template(address, template)
        try:
            yield Databases(server.address, "migrated") if address is None else Databases(address, template)
        finally:
            with exclusive_access(PREPARED), suppress(BlockingIOError):
                # Nobody else has it: this process is the last one.
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if address is None:
                    server.stop("immediate")
                else:
                    Databases(address, template).drop(with_database(address, template))
                shutil.rmtree(folder, ignore_errors=True)


def start(server: TemporaryServer) -> None:
    """Start the server of this run of the tests, unless another process of it has; the caller has the lock."""
    if server.data.exists():
        if not server.running():
            server.start()
        return
    prepared = prepare()
    server.home.mkdir()
    server.grant_access()
    subprocess.run(["cp", "-a", "--reflink=auto", str(prepared.data), str(server.data)], check=True)
    server.start()


def prepare() -> Server:
    """Create the files of a server with a migrated database, unless they exist for these migrations."""
    prepared = TemporaryServer(PREPARED / digest_of_migrations())
    done = prepared.home / "done"
    if not done.exists():
        for old in PREPARED.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
        prepared.create(CONFIGURATION)
        prepared.start()
        migrate_template(prepared.address, "migrated")
        prepared.stop()
        done.touch()
    return prepared


def migrate_template(address: str, template: str) -> None:
    with psycopg.connect(address, autocommit=True) as session, suppress(psycopg.errors.DuplicateDatabase):
        session.execute(f'CREATE DATABASE "{template}"')
    migrate(with_database(address, template), NAMESPACE)


def digest_of_migrations() -> str:
    digest = hashlib.sha256(CONFIGURATION.encode())
    for path in sorted(MIGRATIONS.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def with_database(address: str, name: str) -> str:
    """Return the address of another database on the same server."""
    parts = urlsplit(address)
    if parts.scheme not in {"postgresql", "postgres"}:
        raise SettingsError("TEST_DATABASE_URL must have the form postgresql://user:password@host:5432/database")
    return parts._replace(path=f"/{name}").geturl()
