"""The databases of the testing kit: a server for each process, or a given one."""

import psycopg
import pytest

from app.fleet.errors import SettingsError
from app.fleet.testing.databases import databases
from tests.support.postgres import Postgres


def connects(address: str) -> bool:
    try:
        with psycopg.connect(address, connect_timeout=5):
            return True
    except psycopg.OperationalError:
        return False


def test_each_test_has_a_migrated_database_and_the_server_ends_with_its_process() -> None:
    with databases() as own:
        one, other = own.create(), own.create()
        assert one != other
        with psycopg.connect(one) as session:
            assert session.execute("SELECT count(*) FROM flotilla.runs").fetchone() == (0,)
        own.drop(one)
        assert not connects(one)
        assert connects(other)
    assert not connects(own.address)


def test_two_processes_have_a_server_each() -> None:
    with databases() as one, databases() as other:
        assert one.address != other.address
        assert connects(one.address)
        assert connects(other.address)


def test_databases_are_created_on_a_given_server(postgres: Postgres) -> None:
    with databases(postgres.address_of()) as own:
        address = own.create()
        with psycopg.connect(address) as session:
            assert session.execute("SELECT count(*) FROM flotilla.runs").fetchone() == (0,)
        own.drop(address)
    with postgres.session() as session:
        names = [name for (name,) in session.execute("SELECT datname FROM pg_database")]
    assert not [name for name in names if name.startswith("template_")]


def test_an_address_that_is_no_url_is_refused() -> None:
    with pytest.raises(SettingsError, match="TEST_DATABASE_URL must have the form"), databases("dbname=tests"):
        pass
