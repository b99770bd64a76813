"""Databases for tests: a PostgreSQL server for each process of the tests, and a new, migrated database for each test.

Without an address, the server is the embedded one. Its files are prepared once, with a migrated database, under
`.flotilla/testing`, and prepared again when a migration changes. Each process that runs tests starts a server on a copy
of them in a temporary folder, and stops and deletes it at its end; pytest-xdist has several processes. With an address,
the databases are created on that server.

A test's database is a copy of the migrated one, which takes a tenth of the time of a migration.

Nothing on these servers is durable: they are for tests.
"""

import hashlib
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

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
def databases(address: str | None = None) -> Iterator[Databases]:
    """Provide databases on a server of this process, or on the server with this address."""
    if address is not None:
        template = f"template_{secrets.token_hex(6)}"
        own = Databases(address, template)
        target = with_database(address, template)
        try:
            migrate_template(address, template)
            yield own
        finally:
            own.drop(target)
        return
    folder = Path(tempfile.mkdtemp(prefix="flotilla-testing-"))
    # PostgreSQL does not run as root, and must be able to enter the folder.
    folder.chmod(0o711)
    server = Server(folder / "postgresql")
    try:
        with exclusive_access(PREPARED):
            prepared = prepare()
            server.home.mkdir()
            server.grant_access()
            subprocess.run(["cp", "-a", "--reflink=auto", str(prepared.data), str(server.data)], check=True)
        server.start()
        yield Databases(server.address, "migrated")
    finally:
        if server.data.exists():
            server.stop("immediate")
        for each in (folder, server.sockets):
            shutil.rmtree(each, ignore_errors=True)


def prepare() -> Server:
    """Create the files of a server with a migrated database, unless they exist for these migrations."""
    prepared = Server(PREPARED / digest_of_migrations())
    done = prepared.home / "done"
    if not done.exists():
        for old in PREPARED.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
        prepared.create(CONFIGURATION)
        prepared.start()
        migrate_template(prepared.address, "migrated")
        prepared.stop()
        shutil.rmtree(prepared.sockets, ignore_errors=True)
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
