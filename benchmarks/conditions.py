"""The conditions of all benchmarks of the engine; they are printed before the figures.

The server is an embedded PostgreSQL 18 with durability on, which is checked. All subjects of a comparison have the same
server settings. The server, its clients and the instances share two cores, also on a larger machine.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from tests.support.fleet import Fleet, InstanceProcess
from tests.support.postgres import Postgres, server

CORES = 2
SETTINGS = {"fsync": "on", "max_wal_size": "4GB", "min_wal_size": "1GB", "shared_buffers": "512MB"}
SEGMENTS = 40
DURABILITY = ("fsync", "synchronous_commit", "full_page_writes")
ACTIONS = "benchmarks.actions"
# So many instances start at once.
WAVE = 5


def two_cores() -> None:
    """Restrict this process, and all processes that it starts, to two cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


@contextmanager
def durable_server(configuration: str = "") -> Iterator[Postgres]:
    """Start the server, and print its version and settings."""
    configuration += "".join(f"{name} = '{value}'\n" for name, value in SETTINGS.items())
    with server(configuration=configuration) as postgres:
        with postgres.session() as session:
            shown = {name: shown_by(session, name) for name in (*DURABILITY, *SETTINGS)}
            version = shown_by(session, "server_version")
        off = [name for name in DURABILITY if shown[name] != "on"]
        if off:
            raise RuntimeError(f"{', '.join(off)} is not on: figures without durability are not comparable")
        with postgres.session() as session:
            recycle(session)
        cores = len(os.sched_getaffinity(0))
        print(f"PostgreSQL {version}; {'; '.join(f'{k} {v}' for k, v in shown.items())}; {cores} cores\n", flush=True)
        yield postgres


def recycle(session: psycopg.Connection[tuple[object, ...]]) -> None:
    """Give the server WAL segments that it can reuse, as a server has them that has been running for a day.

    Otherwise it creates a new segment every 16 MB, and a commit waits 10 ms for it.
    """
    for _ in range(SEGMENTS):
        session.execute("SELECT pg_logical_emit_message(false, '', '')")
        session.execute("SELECT pg_switch_wal()")
    session.execute("CHECKPOINT")


def shown_by(session: psycopg.Connection[tuple[object, ...]], name: str) -> str:
    row = session.execute(f"SHOW {name}").fetchone()
    assert row is not None
    return str(row[0])


def start_in_waves(fleet: Fleet, count: int) -> list[InstanceProcess]:
    """Start many instances, a few at a time: each of them uses a core for more than a second."""
    return [instance for first in range(0, count, WAVE) for instance in fleet.start(min(WAVE, count - first))]


@contextmanager
def started_instances(count: int, **env: str) -> Iterator[tuple[Postgres, Fleet, list[InstanceProcess]]]:
    """Start real instances of the service, with the actions of the benchmarks."""
    own = {"FLOTILLA_ACTIONS": ACTIONS, "FLOTILLA_LOG_LEVEL": "warning", **env}
    with (
        durable_server() as postgres,
        tempfile.TemporaryDirectory() as folder,
        Fleet(postgres.address_of(), Path(folder), **own) as fleet,
    ):
        yield postgres, fleet, fleet.start(count)
