"""The databases of the testing kit: a server for each run of the tests, or a given one."""

import secrets

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


@pytest.fixture
def run() -> str:
    return secrets.token_hex(4)


def test_processes_of_one_run_share_a_server_that_the_last_one_stops(run: str) -> None:
    with databases(run) as first:
        with databases(run) as second:
            assert second.address == first.address
        assert connects(first.address)
        one, other = first.create(), first.create()
        assert one != other
        with psycopg.connect(one) as session:
            assert session.execute("SELECT count(*) FROM flotilla.runs").fetchone() == (0,)
        first.drop(one)
        assert not connects(one)
        assert connects(other)
    assert not connects(first.address)


def test_two_runs_have_a_server_each(run: str) -> None:
    with databases(f"{run}-1") as one, databases(f"{run}-2") as other:
        assert one.address != other.address
        assert connects(one.address)
        assert connects(other.address)


def test_databases_are_created_on_a_given_server(run: str, postgres: Postgres) -> None:
    with databases(run, postgres.address_of()) as own:
        address = own.create()
        with psycopg.connect(address) as session:
            assert session.execute("SELECT count(*) FROM flotilla.runs").fetchone() == (0,)
        own.drop(address)
    with postgres.session() as session:
        names = [name for (name,) in session.execute("SELECT datname FROM pg_database")]
    assert not [name for name in names if run in name]


def test_an_address_that_is_no_url_is_refused(run: str) -> None:
    with pytest.raises(SettingsError, match="TEST_DATABASE_URL must have the form"), databases(run, "dbname=tests"):
        pass
