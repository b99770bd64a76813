"""A real PgBouncer in front of a real PostgreSQL, in the pooling mode that a test needs."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from app.fleet.db.embedded import USER
from tests.support.postgres import Postgres, eventually, free_port
from tests.support.tools import program

CONFIGURATION = """
[databases]
* = host=127.0.0.1 port={target}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
auth_type = any
pool_mode = {mode}
default_pool_size = 20
max_client_conn = 500
unix_socket_dir =
{more}
"""


@contextmanager
def pgbouncer(postgres: Postgres, *, mode: str = "transaction", more: str = "") -> Iterator[int]:
    """Run a PgBouncer for the duration of the block, and yield its port."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="flotilla-bouncer-") as folder:
        settings = Path(folder) / "pgbouncer.ini"
        # `auth_type = any` needs a user for the connections to the server.
        target = f"{postgres.port} user=postgres"
        settings.write_text(CONFIGURATION.format(target=target, port=port, mode=mode, more=more))
        as_root = os.geteuid() == 0
        if as_root:
            Path(folder).chmod(0o755)
        process = subprocess.Popen(
            [program("pgbouncer"), "-q", str(settings)],
            user=USER if as_root else None,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            eventually(lambda: answers(port))
            yield port
        finally:
            process.terminate()
            process.wait()


def answers(port: int) -> bool:
    try:
        with psycopg.connect(f"postgresql://postgres@127.0.0.1:{port}/postgres?connect_timeout=2"):
            return True
    except psycopg.OperationalError:
        return False
