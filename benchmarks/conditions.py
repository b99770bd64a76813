"""The conditions every figure of the engine is taken under, said before each of them.

One embedded PostgreSQL 18 with durability on, which is asked for and not believed; the same settings for everyone who
is measured on it; two cores for the server, its clients and the instances together, also where there are more.
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


def two_cores() -> None:
    """Keep this process, and whatever it starts, on two cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


@contextmanager
def durable_server() -> Iterator[Postgres]:
    """Run the server that is measured on, and say what it is."""
    configuration = "".join(f"{name} = '{value}'\n" for name, value in SETTINGS.items())
    with server(configuration=configuration) as postgres:
        with postgres.session() as session:
            shown = {name: shown_by(session, name) for name in (*DURABILITY, *SETTINGS)}
            version = shown_by(session, "server_version")
        off = [name for name in DURABILITY if shown[name] != "on"]
        if off:
            raise RuntimeError(f"{', '.join(off)} is not on: a figure without durability is no figure")
        with postgres.session() as session:
            recycle(session)
        cores = len(os.sched_getaffinity(0))
        print(f"PostgreSQL {version}; {'; '.join(f'{k} {v}' for k, v in shown.items())}; {cores} cores\n", flush=True)
        yield postgres


def recycle(session: psycopg.Connection[tuple[object, ...]]) -> None:
    """Leave the server with log segments to use again, as one that has been running for a day has them.

    Else it makes a new one every 16 MB, and whoever commits then waits 10 ms for it.
    """
    for _ in range(SEGMENTS):
        session.execute("SELECT pg_logical_emit_message(false, '', '')")
        session.execute("SELECT pg_switch_wal()")
    session.execute("CHECKPOINT")


def shown_by(session: psycopg.Connection[tuple[object, ...]], name: str) -> str:
    row = session.execute(f"SHOW {name}").fetchone()
    assert row is not None
    return str(row[0])


@contextmanager
def started_instances(count: int, **env: str) -> Iterator[tuple[Postgres, Fleet, list[InstanceProcess]]]:
    """Run that many real instances of the service, with the actions of the benchmarks."""
    own = {"FLOTILLA_ACTIONS": ACTIONS, "FLOTILLA_LOG_LEVEL": "warning", **env}
    with (
        durable_server() as postgres,
        tempfile.TemporaryDirectory() as folder,
        Fleet(postgres.address_of(), Path(folder), **own) as fleet,
    ):
        yield postgres, fleet, fleet.start(count)
