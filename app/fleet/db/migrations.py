"""Migrations: applied once, however many instances start at the same moment.

Alembic runs under a session advisory lock of the namespace. Each process inspects the schema after it has taken the
lock, so a process that had to wait finds the schema migrated. The lock is polled: a session that is blocked in
`pg_advisory_lock` holds a snapshot, and a migration with CREATE INDEX CONCURRENTLY would wait for that snapshot while
the session waits for the migration. If a process is killed during a migration, its session ends, its lock is released,
and PostgreSQL rolls the migration back.

    the schema is            because                                          then
    absent, or empty         the namespace is new                             migrate
    behind                   a deploy brought new migrations                  migrate, or wait for who may
    current                                                                   continue
    ahead                    a newer release migrated first (rolling deploy)  continue: migrations expand, then contract
    foreign                  it contains other tables                         refuse, before anything is written

There are two branches, `fleet` and `app`, so that a template update adds its migrations beside the service's.
"""

import enum
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool

from alembic import command
from app.fleet.db.direct import DirectSession, open_session
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.errors import SchemaForeign, SchemaOutdated
from app.fleet.telemetry.logs import event_log

ROOT = Path(__file__).resolve().parents[3]
POLL_INTERVAL = 0.1
# How long a process waits while another one migrates.
LOCK_TIMEOUT = 300.0
# Alembic keeps its state in a module, so two namespaces in one process must migrate one after the other.
ALEMBIC = threading.Lock()

log = event_log(__name__)

TRY_LOCK = Statement("SELECT pg_try_advisory_lock(hashtextextended('flotilla/migrate/{channel}', 0))")
UNLOCK = Statement("SELECT pg_advisory_unlock(hashtextextended('flotilla/migrate/{channel}', 0))")

READ_REVISIONS = Statement("SELECT version_num FROM {schema}.alembic_version")

INSPECT = Statement("""
SELECT to_regclass('{schema}.alembic_version') IS NOT NULL AS versioned,
       to_regclass('{schema}.instances') IS NOT NULL AS has_instances,
       EXISTS (
           SELECT FROM pg_catalog.pg_class AS c
           JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
           WHERE n.nspname = '{channel}'
       ) AS occupied
""")


class State(enum.Enum):
    ABSENT = "absent"
    BEHIND = "behind"
    CURRENT = "current"
    AHEAD = "ahead"


def configuration() -> Config:
    """Return Alembic's configuration; it needs neither `alembic.ini` nor a certain working directory."""
    config = Config()
    config.set_main_option("path_separator", "newline")
    config.set_main_option("script_location", str(ROOT / "alembic"))
    folders = [str(ROOT / "alembic" / "versions" / branch) for branch in ("fleet", "app")]
    config.set_main_option("version_locations", "\n".join(folders))
    return config


def inspect(connection: psycopg.Connection[psycopg.rows.TupleRow], namespace: Namespace) -> State:
    """Return the state of the namespace's schema; raise `SchemaForeign` if it is not Flotilla's."""
    row = connection.execute(namespace.sql(INSPECT)).fetchone()
    assert row is not None
    versioned, has_instances, occupied = row
    if not occupied:
        return State.ABSENT
    found: set[str] = set()
    if versioned:
        rows = connection.execute(namespace.sql(READ_REVISIONS)).fetchall()
        found = {str(version) for (version,) in rows}
    scripts = ScriptDirectory.from_config(configuration())
    known = {script.revision for script in scripts.walk_revisions()}
    if not versioned or (found and not has_instances):
        raise SchemaForeign(
            f"the schema {namespace.schema!r} exists and is not Flotilla's: choose another FLOTILLA_NAMESPACE, or "
            f"empty that schema if it is not needed. Nothing was changed"
        )
    if found - known:
        return State.AHEAD
    return State.CURRENT if found == set(scripts.get_heads()) else State.BEHIND


def migrate(address: str, namespace: Namespace, *, wait: float = LOCK_TIMEOUT) -> bool:
    """Migrate the schema to the newest revision, once for the whole cluster; return whether this process did it."""
    with open_session(address, application=namespace.application("migrate"), lease=None) as session:
        session.patience = None
        take_lock(session, namespace, wait)
        try:
            state = inspect(session, namespace)
            if state in {State.CURRENT, State.AHEAD}:
                return False
            log.info("migration.started", state=state.value)
            started = time.monotonic()
            upgrade(address, namespace)
            log.info("migration.finished", seconds=round(time.monotonic() - started, 2))
            return True
        finally:
            session.execute(namespace.sql(UNLOCK))


def take_lock(session: psycopg.Connection[psycopg.rows.TupleRow], namespace: Namespace, wait: float) -> None:
    deadline = time.monotonic() + wait
    while session.execute(namespace.sql(TRY_LOCK)).fetchone() != (True,):
        if time.monotonic() > deadline:
            raise SchemaOutdated(
                f"another process has been migrating {namespace.schema!r} for {wait:.0f} s: find what it waits "
                f"for in pg_stat_activity (application_name {namespace.application('migrate')!r})"
            )
        time.sleep(POLL_INTERVAL)


def upgrade(address: str, namespace: Namespace) -> None:
    """Run Alembic on a new session, in one transaction, in the namespace's schema."""
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: alembic_session(address, namespace),
        poolclass=StaticPool,
    )
    config = configuration()
    config.attributes["namespace"] = namespace
    try:
        with ALEMBIC, engine.connect() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "heads")
    finally:
        engine.dispose()


def alembic_session(address: str, namespace: Namespace) -> DirectSession:
    """Open a session for Alembic: transactional, and without a limit on the time of a statement."""
    session = open_session(address, application=namespace.application("alembic"), lease=None, autocommit=False)
    session.patience = None
    return session


def ensure_current(
    address: str, namespace: Namespace, *, allowed: bool, wait: float, should_stop: Callable[[], bool] = lambda: False
) -> None:
    """Migrate if allowed; otherwise wait for another process to migrate, unless `should_stop` returns true."""
    if allowed:
        migrate(address, namespace)
        return
    deadline = time.monotonic() + wait
    logged = False
    while True:
        with open_session(address, application=namespace.application("start"), lease=None) as session:
            state = inspect(session, namespace)
        if state in {State.CURRENT, State.AHEAD}:
            return
        if time.monotonic() >= deadline or should_stop():
            raise SchemaOutdated(
                f"the schema {namespace.schema!r} is {state.value}, and this instance does not migrate by itself: run "
                f"`flotilla migrate` (the container `migrate` of a pod does), or set FLOTILLA_MIGRATE_ON_START=true"
            )
        if not logged:
            log.info("migration.awaited", state=state.value, seconds=wait)
            logged = True
        time.sleep(0.5)
