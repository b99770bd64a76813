"""The privileges of docs/guides/deploy.md are enough to run an instance, and not enough to change the schema."""

import psycopg
import pytest

from tests.deploy.declared import ROOT
from tests.support.fleet import Fleet, run
from tests.support.pages import blocks
from tests.support.postgres import Postgres, eventually

pytestmark = pytest.mark.template

BEHIND_A_POOLER, FIRST_OF_ALL, LATER = (
    block.text for block in blocks(ROOT / "docs/guides/deploy.md") if block.language == "sql"
)
DATABASE = "flotilla"


@pytest.fixture(params=["roles first", "schema first"])
def address(request: pytest.FixtureRequest, own_postgres: Postgres) -> str:
    """Return the address of a migrated database for the role that only runs. Roles need a server of their own."""
    with own_postgres.session() as session:
        session.execute("CREATE ROLE administrator LOGIN CREATEROLE")
        session.execute(f'CREATE DATABASE "{DATABASE}" OWNER administrator')
    with psycopg.connect(own_postgres.address_of(DATABASE, "administrator"), autocommit=True) as session:
        if request.param == "roles first":
            session.execute(FIRST_OF_ALL.encode())
            migrate(own_postgres, "flotilla_migrate")
        else:
            session.execute("CREATE ROLE flotilla_run LOGIN")
            migrate(own_postgres, "administrator")
            session.execute(LATER.encode())
        session.execute(BEHIND_A_POOLER.encode())
    return own_postgres.address_of(DATABASE, "flotilla_run")


def migrate(postgres: Postgres, role: str) -> None:
    done = run("migrate", address=postgres.address_of(DATABASE, role))
    assert done.returncode == 0, done.stderr


def test_an_instance_can_run_lead_and_leave_with_the_granted_privileges(fleet: Fleet) -> None:
    (instance,) = fleet.start(FLOTILLA_MIGRATE_ON_START="false")
    eventually(lambda: instance.instances()["leader"] is not None)
    instance.terminate()
    instance.wait_exit()
    assert instance.lines("shutdown.finished")
    assert instance.errors() == []


def test_the_doctor_accepts_the_granted_privileges(address: str) -> None:
    done = run("doctor", address=address)
    assert done.returncode == 0, done.stdout
    assert "enough to run, but not to migrate" in done.stdout


def test_an_instance_cannot_change_the_schema(address: str) -> None:
    with psycopg.connect(address, autocommit=True) as session:
        for statement in ("DROP TABLE flotilla.instances", "CREATE TABLE flotilla.mine ()", "CREATE SCHEMA mine"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                session.execute(statement)
