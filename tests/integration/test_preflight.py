"""A database on which the service would not be safe is refused before anything is written, with advice."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from app.fleet.cli.doctor import Level, examine
from app.fleet.db import dsn, preflight
from app.fleet.errors import (
    DatabaseReadOnly,
    DatabasesDiffer,
    DatabaseTooOld,
    DatabaseUnreachable,
    DirectConnectionRequired,
    IsolationUnsupported,
    SettingsError,
)
from app.settings import Settings
from tests.support.old_postgres import OldPostgres
from tests.support.pgbouncer import pgbouncer
from tests.support.postgres import Postgres, free_port, server
from tests.support.proxy import Proxy
from tests.support.runs import soon
from tests.support.service import Running, is_ready, service


def check(address: str, direct: str | None = None) -> None:
    preflight.check_direct(dsn.resolve(Settings.load(database_url=address, database_direct_url=direct)))


def test_a_suitable_database_is_accepted(address: str) -> None:
    check(address)


def test_postgresql_16_is_accepted() -> None:
    with server(version=16) as older:
        check(older.address_of())


def test_an_unreachable_database_is_named_without_its_password() -> None:
    with pytest.raises(DatabaseUnreachable) as error:
        check(f"postgresql://app:hunter2@127.0.0.1:{free_port()}/app")
    assert "127.0.0.1" in str(error.value)
    assert "Check that it runs" in str(error.value)
    assert "hunter2" not in str(error.value)


def test_a_database_that_does_not_exist_is_named_in_the_error(postgres: Postgres) -> None:
    with pytest.raises(DatabaseUnreachable, match='database "nowhere" does not exist'):
        check(postgres.address_of("nowhere"))


@pytest.mark.parametrize("nonsense", ["not an address", "postgresql://app:hunter2@[db/x", "http://db:hunter2@x"])
def test_an_invalid_address_is_refused_without_being_repeated(nonsense: str) -> None:
    with pytest.raises(SettingsError, match="the form is") as error:
        check(nonsense)
    assert "hunter2" not in str(error.value)


def test_the_repr_of_an_address_has_no_password() -> None:
    addresses = dsn.resolve(Settings.load(database_url="postgresql://app:hunter2@db/app"))
    assert "hunter2" not in repr(addresses)
    assert addresses.location == "db/app"


def test_an_sqlalchemy_address_is_accepted(address: str) -> None:
    check(address.replace("postgresql://", "postgresql+psycopg://"))


def test_a_version_before_14_is_refused() -> None:
    with OldPostgres() as old, pytest.raises(DatabaseTooOld, match="version 13; Flotilla needs 14"):
        check(old.address)


def test_a_standby_is_refused(own_postgres: Postgres) -> None:
    standby = own_postgres.standby(own_postgres.home.parent / "standby")
    try:
        with pytest.raises(DatabaseReadOnly, match="point DATABASE_URL at the primary"):
            check(standby.address_of())
        with pytest.raises(DatabaseReadOnly):
            check(standby.address_of() + "?target_session_attrs=any")
    finally:
        standby.destroy()


def test_a_read_only_server_is_refused(own_postgres: Postgres) -> None:
    own_postgres.set("default_transaction_read_only", "on")
    with pytest.raises(DatabaseReadOnly):
        check(own_postgres.address_of())


@pytest.mark.parametrize("more", ["", "ignore_startup_parameters = options"])
def test_pgbouncer_in_transaction_mode_is_refused_as_the_direct_address(postgres: Postgres, more: str) -> None:
    with pgbouncer(postgres, more=more) as port:
        with pytest.raises(DirectConnectionRequired, match="set DATABASE_DIRECT_URL to PostgreSQL itself"):
            check(f"postgresql://postgres@127.0.0.1:{port}/postgres")
        check(f"postgresql://postgres@127.0.0.1:{port}/postgres", direct=postgres.address_of())


@pytest.mark.anyio
async def test_an_instance_behind_pgbouncer_serves_if_it_has_a_direct_address(postgres: Postgres, address: str) -> None:
    name = address.rpartition("/")[2]
    with pgbouncer(postgres) as port:
        through = f"postgresql://postgres@127.0.0.1:{port}/{name}"
        async with service(through, database_direct_url=address) as running:
            answers = await asyncio.gather(*(running.client.get("/trial/database") for _ in range(50)))
            assert {answer.status_code for answer in answers} == {200}
            await soon(lambda: is_ready(running))
            settings = Settings.load(database_url=through, database_direct_url=address)
            details = {each.subject: each.detail for each in await asyncio.to_thread(examine, settings)}
        assert "leads through a pooler" in details["pooler"]
        assert "1 living instances may open 2 of" in details["connection budget"], (
            "the sessions of the pool count as sessions of the pooler"
        )


# -- two addresses, one database --------------------------------------------------------------------------------------


def route(address: str, direct: str | None = None) -> preflight.Route:
    return preflight.check_pool(dsn.resolve(Settings.load(database_url=address, database_direct_url=direct)))


def test_two_addresses_of_one_database_are_accepted(address: str, postgres: Postgres) -> None:
    name = address.rpartition("/")[2]
    assert not route(address).through_pooler
    assert not route(f"postgresql://postgres@localhost:{postgres.port}/{name}", address).through_pooler
    with pgbouncer(postgres) as port:
        assert route(f"postgresql://postgres@127.0.0.1:{port}/{name}", address).through_pooler


def test_addresses_of_two_databases_or_two_servers_are_refused(
    address: str, postgres: Postgres, own_postgres: Postgres
) -> None:
    for other in (postgres.address_of(), own_postgres.address_of(), create_copy(address, own_postgres)):
        with pytest.raises(DatabasesDiffer, match="lead to different databases"):
            route(other, address)
    with pytest.raises(DatabaseUnreachable, match='database "nowhere" does not exist'):
        route(postgres.address_of("nowhere"), address)


def create_copy(address: str, own_postgres: Postgres) -> str:
    """Make a database of the same name, with the same tables, on another server."""
    name = address.rpartition("/")[2]
    like = own_postgres.new_migrated_database().rpartition("/")[2]
    with own_postgres.session() as session:
        session.execute(f'ALTER DATABASE "{like}" RENAME TO "{name}"')
    return own_postgres.address_of(name)


@pytest.mark.anyio
async def test_an_instance_whose_pool_reaches_another_database_answers_503(
    address: str, postgres: Postgres, own_postgres: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a failover that moved only one of the two addresses. Nothing is written to the wrong database."""
    copy = create_copy(address, own_postgres)
    with Proxy(("127.0.0.1", postgres.port)) as proxy:
        through = f"postgresql://postgres@127.0.0.1:{proxy.port}/{address.rpartition('/')[2]}"
        async with service(through, database_direct_url=address) as running:
            assert (await running.client.get("/trial/database")).status_code == 200
            proxy.target = ("127.0.0.1", own_postgres.port)
            proxy.cut()
            await wait_until(lambda: "pool.elsewhere" in caplog.messages)
            for _ in range(5):
                assert (await running.client.get("/trial/database")).status_code == 503
            await wait_until(running.context.member.holds)
            proxy.target = ("127.0.0.1", postgres.port)
            proxy.cut()
            await wait_until(lambda: running.context.database.healthy)
            assert (await running.client.get("/trial/database")).status_code == 200
    with psycopg.connect(copy) as session:
        assert session.execute("SELECT count(*) FROM flotilla.runs").fetchone() == (0,)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 — a change of this state sends no signal
            await asyncio.sleep(0.02)


def test_a_pooler_whose_sessions_are_not_read_committed_is_refused(address: str, postgres: Postgres) -> None:
    name = address.rpartition("/")[2]
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'repeatable read'")
    assert route(address).default_isolation == "repeatable read", "the sessions of the template set another level"
    with pgbouncer(postgres) as port, pytest.raises(IsolationUnsupported, match="ALTER ROLE"):
        route(f"postgresql://postgres@127.0.0.1:{port}/{name}", address)


@pytest.mark.parametrize(
    ("host", "tls", "unencrypted"),
    [("", False, False), ("127.0.0.1", False, False), ("::1", False, False), ("10.1.2.3", True, False),
     ("10.1.2.3", False, True), ("2001:db8::5", False, True)],
)  # fmt: skip
def test_a_database_on_another_machine_needs_tls(host: str, tls: bool, unencrypted: bool) -> None:
    connection: Any = SimpleNamespace(info=SimpleNamespace(hostaddr=host), pgconn=SimpleNamespace(ssl_in_use=tls))
    assert preflight.crosses_unencrypted(connection) is unencrypted


# -- the doctor -------------------------------------------------------------------------------------------------------


def findings(address: str, **settings: object) -> dict[str, Level]:
    return {each.subject: each.level for each in examine(Settings.load(database_url=address, **settings))}


@pytest.mark.anyio
async def test_the_doctor_finds_nothing_wrong_with_a_running_service(address: str) -> None:
    async with service(address):
        found = await asyncio.to_thread(findings, address)
    assert found.pop("api keys") is Level.WARNING
    checked = {"settings", "database", "schema", "clock", "privileges", "connection budget", "isolation", "encryption"}
    assert set(found) == checked
    assert set(found.values()) == {Level.OK}


@pytest.mark.anyio
async def test_the_doctor_and_an_anomaly_report_that_instances_may_open_too_many_sessions(
    address: str,
) -> None:
    async with service(address, pool_max=500, pool_min=1) as running:
        found = await asyncio.to_thread(examine, Settings.load(database_url=address))
        (budget,) = [each for each in found if each.subject == "connection budget"]
        assert budget.level is Level.WARNING
        assert "lower FLOTILLA_POOL_MAX" in budget.detail
        (anomaly,) = [
            each
            for each in (await running.client.get("/health/instances")).json()["anomalies"]
            if each["kind"] == "connection_budget"
        ]
        assert anomaly["subject"] == "max_connections"
        assert "502 sessions" in anomaly["detail"]
        assert anomaly["since"]


@pytest.mark.empty_database
def test_the_doctor_reports_missing_migrations_that_no_instance_will_run(address: str) -> None:
    assert findings(address, migrate_on_start=False)["schema"] is Level.PROBLEM
    assert findings(address, migrate_on_start=True)["schema"] is Level.OK


def test_the_doctor_reports_an_unreachable_database_and_stops() -> None:
    found = findings(f"postgresql://app@127.0.0.1:{free_port()}/app")
    assert found["database"] is Level.PROBLEM
    assert "schema" not in found


async def leader_of(running: Running) -> str | None:
    leader: str | None = (await running.client.get("/health/instances")).json()["leader"]
    return leader


@pytest.mark.parametrize("privilege", ["SELECT", "INSERT", "UPDATE", "DELETE", "USAGE"])
def test_the_doctor_reports_each_missing_privilege(address: str, postgres: Postgres, privilege: str) -> None:
    """A role that may only read is not enough to run."""
    role = f"lacking_{address.rpartition('_')[2]}"
    revoked_on = "SEQUENCE flotilla.once_tokens" if privilege == "USAGE" else "flotilla.runs"
    steps = (
        f"CREATE ROLE {role} LOGIN",
        f"GRANT USAGE ON SCHEMA flotilla TO {role}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA flotilla TO {role}",
        f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA flotilla TO {role}",
        f"REVOKE {privilege} ON {revoked_on} FROM {role}",
    )
    with psycopg.connect(address, autocommit=True) as session:
        for step in steps:
            session.execute(step)
    try:
        own = postgres.address_of(address.rpartition("/")[2], user=role)
        found = {each.subject: each for each in examine(Settings.load(database_url=own))}
        assert found["privileges"].level is Level.PROBLEM
        what = "once_tokens" if privilege == "USAGE" else "runs"
        assert f"lacks {privilege} on {what}" in found["privileges"].detail
    finally:
        with psycopg.connect(address, autocommit=True) as session:
            session.execute(f"DROP OWNED BY {role}")
            session.execute(f"DROP ROLE {role}")


@pytest.mark.anyio
async def test_an_instance_needs_only_a_role_that_may_run_but_not_migrate(
    address: str, postgres: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    """Least privilege, as docs/guides/deploy.md grants it."""
    async with service(address):
        pass
    role = f"runner_{address.rpartition('_')[2]}"
    grants = (
        f"CREATE ROLE {role} LOGIN",
        f"GRANT USAGE ON SCHEMA flotilla TO {role}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA flotilla TO {role}",
        f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA flotilla TO {role}",
    )
    name = address.rpartition("/")[2]
    with psycopg.connect(address, autocommit=True) as session:
        for grant in grants:
            session.execute(grant)
    own = postgres.address_of(name, user=role)

    async def not_allowed() -> bool:
        return "leader.not_allowed" in caplog.messages

    try:
        assert (await asyncio.to_thread(findings, own))["privileges"] is Level.OK
        async with service(own, migrate_on_start=False) as running:
            await soon(lambda: leader_of(running))
        with psycopg.connect(address, autocommit=True) as session:
            session.execute(f"REVOKE UPDATE ON flotilla.leader_turn FROM {role}")
        assert (await asyncio.to_thread(findings, own))["privileges"] is Level.PROBLEM
        caplog.clear()
        async with service(own, migrate_on_start=False) as running:
            await soon(not_allowed)
            await soon(lambda: is_ready(running))
        assert caplog.messages.count("leader.not_allowed") == 1
    finally:
        with psycopg.connect(address, autocommit=True) as session:
            session.execute(f"DROP OWNED BY {role}")
            session.execute(f"DROP ROLE {role}")
