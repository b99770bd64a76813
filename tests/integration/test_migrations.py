"""Migrations are applied once, in the right schema, and agree with the models."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from alembic.script import ScriptDirectory

from alembic import command
from app.fleet.db import migrations
from app.fleet.db.migrations import State
from app.fleet.db.namespace import Namespace
from app.fleet.errors import SchemaForeign, SchemaOutdated
from tests.support.postgres import eventually

pytestmark = pytest.mark.empty_database
POSTGRES_VERSIONS = (18, 16)
NAMESPACE = Namespace("red-sea")


def state(address: str) -> State:
    with psycopg.connect(address, autocommit=True) as session:
        return migrations.inspect(session, NAMESPACE)


def test_an_empty_database_is_migrated_once_and_is_then_current(address: str) -> None:
    assert state(address) is State.ABSENT
    assert migrations.migrate(address, NAMESPACE) is True
    assert state(address) is State.CURRENT
    assert migrations.migrate(address, NAMESPACE) is False


def test_ten_concurrent_migrations_migrate_once(address: str) -> None:
    with ThreadPoolExecutor(10) as pool:
        done = list(pool.map(lambda _: migrations.migrate(address, Namespace("red-sea")), range(10)))
    assert sum(done) == 1
    assert state(address) is State.CURRENT


def test_models_and_migrations_agree(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    migrations.migrate(address, Namespace("flotilla"))
    monkeypatch.setenv("DATABASE_URL", address)
    command.check(migrations.configuration())


def test_there_are_two_branches_each_with_one_head() -> None:
    scripts = ScriptDirectory.from_config(migrations.configuration())
    assert sorted(label for head in scripts.get_revisions("heads") for label in head.branch_labels) == ["app", "fleet"]


def test_every_migration_can_be_taken_back(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    migrations.migrate(address, Namespace("flotilla"))
    monkeypatch.setenv("DATABASE_URL", address)
    command.downgrade(migrations.configuration(), "base")
    with psycopg.connect(address) as session:
        left = session.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'flotilla'::regnamespace AND relkind <> 'i'"
        ).fetchall()
    assert left == [("alembic_version",)]
    command.upgrade(migrations.configuration(), "heads")


def test_migrations_create_nothing_outside_of_the_schema_of_the_namespace(address: str) -> None:
    migrations.migrate(address, NAMESPACE)
    with psycopg.connect(address) as session:
        rows = session.execute(
            "SELECT DISTINCT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'"
        ).fetchall()
    assert rows == [("red_sea",)]


def test_a_schema_of_another_application_is_refused_and_not_changed(address: str) -> None:
    with psycopg.connect(address, autocommit=True) as session:
        session.execute("CREATE SCHEMA red_sea")
        session.execute("CREATE TABLE red_sea.customers (id int)")
    with pytest.raises(SchemaForeign, match="choose another FLOTILLA_NAMESPACE"):
        migrations.migrate(address, NAMESPACE)
    with psycopg.connect(address) as session:
        rows = session.execute("SELECT relname FROM pg_class WHERE relnamespace = 'red_sea'::regnamespace").fetchall()
    assert rows == [("customers",)]


def test_a_schema_with_an_alembic_table_of_another_project_is_refused(address: str) -> None:
    with psycopg.connect(address, autocommit=True) as session:
        session.execute("CREATE SCHEMA red_sea")
        session.execute("CREATE TABLE red_sea.alembic_version (version_num varchar(32))")
        session.execute("INSERT INTO red_sea.alembic_version VALUES ('1a2b3c')")
    with pytest.raises(SchemaForeign):
        migrations.migrate(address, NAMESPACE)


def test_an_existing_empty_schema_is_migrated(address: str) -> None:
    with psycopg.connect(address, autocommit=True) as session:
        session.execute("CREATE SCHEMA red_sea")
    assert migrations.migrate(address, NAMESPACE) is True


def test_a_schema_that_a_newer_release_has_migrated_is_accepted_and_not_changed(address: str) -> None:
    migrations.migrate(address, NAMESPACE)
    with psycopg.connect(address, autocommit=True) as session:
        session.execute("UPDATE red_sea.alembic_version SET version_num = 'fleet_9999' WHERE version_num ~ '^fleet'")
    assert state(address) is State.AHEAD
    migrations.ensure_current(address, NAMESPACE, allowed=True, wait=0)
    migrations.ensure_current(address, NAMESPACE, allowed=False, wait=0)


def test_an_instance_that_may_not_migrate_waits_for_the_migration(address: str) -> None:
    waiting = threading.Thread(
        target=migrations.ensure_current, args=(address, NAMESPACE), kwargs={"allowed": False, "wait": 60}
    )
    waiting.start()
    waiting.join(0.7)
    assert waiting.is_alive()
    migrations.migrate(address, NAMESPACE)
    waiting.join(30)
    assert not waiting.is_alive()


def test_an_instance_that_waits_in_vain_for_a_migration_raises_with_advice(address: str) -> None:
    with pytest.raises(SchemaOutdated, match="flotilla migrate"):
        migrations.ensure_current(address, NAMESPACE, allowed=False, wait=0)
    assert state(address) is State.ABSENT


def test_a_killed_migration_is_rolled_back_and_holds_no_lock(address: str) -> None:
    """The session of a migration is terminated: the migration is rolled back, and the next one succeeds."""
    with psycopg.connect(address) as blocker:
        # Alembic will wait for this transaction, which has created the schema and has not committed.
        blocker.execute("CREATE SCHEMA red_sea")
        failed: list[BaseException] = []

        def attempt() -> None:
            try:
                migrations.migrate(address, NAMESPACE)
            except Exception as error:
                failed.append(error)

        migrating = threading.Thread(target=attempt)
        migrating.start()
        with psycopg.connect(address, autocommit=True) as other:
            ended = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '%/alembic' "
                "AND wait_event_type = 'Lock' AND datname = current_database()"
            )
            eventually(lambda: other.execute(ended).fetchone())
        migrating.join(30)
        blocker.rollback()
    assert failed
    assert state(address) is State.ABSENT
    assert migrations.migrate(address, NAMESPACE) is True


def test_waiting_for_a_migration_holds_no_snapshot(address: str) -> None:
    """A migration may build an index CONCURRENTLY, which waits for the snapshots of all sessions."""
    with psycopg.connect(address, autocommit=True) as holder:
        holder.execute(NAMESPACE.sql(migrations.TRY_LOCK))
        waiting = threading.Thread(target=migrations.migrate, args=(address, NAMESPACE))
        waiting.start()
        find = (
            "SELECT backend_xmin IS NULL FROM pg_stat_activity WHERE application_name = 'flotilla/red-sea/migrate' "
            "AND state = 'idle'"
        )
        assert eventually(lambda: holder.execute(find).fetchone()) == (True,)
        holder.execute(NAMESPACE.sql(migrations.UNLOCK))
        waiting.join(30)
    assert state(address) is State.CURRENT


@pytest.mark.anyio
async def test_two_namespaces_can_be_migrated_at_the_same_time(address: str) -> None:
    names = [Namespace("one"), Namespace("two")]
    done = await asyncio.gather(*(asyncio.to_thread(migrations.migrate, address, name) for name in names))
    assert done == [True, True]
