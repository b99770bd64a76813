"""Fixtures everyone uses: one PostgreSQL 18 for the whole run, a database of its own for each test, and a fleet."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fleet as fleets
from tests.support.fleet import Fleet
from tests.support.postgres import Postgres, server
from tests.support.slipway import Slipway


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a module that names `POSTGRES_VERSIONS` on each of them."""
    versions = getattr(metafunc.module, "POSTGRES_VERSIONS", None)
    if versions and "postgres" in metafunc.fixturenames:
        metafunc.parametrize("postgres", versions, indirect=True, scope="session")


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    """Settings come from the test alone: not from a shell, and not from a `.env` in the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("FLOTILLA_", "DATABASE_")):
                patch.delenv(name)
        from app.fleet.settings import FleetSettings
        from app.settings import Settings

        for settings in (FleetSettings, Settings):
            patch.setitem(settings.model_config, "env_file", None)
        yield


@pytest.fixture(scope="session", autouse=True)
def slipway() -> Iterator[None]:
    """Whatever instance a test starts comes off it, if it can."""
    fleets.slipway = Slipway()
    yield
    fleets.slipway.close()
    fleets.slipway = None


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Iterator[Postgres]:
    """A server that stays up for the whole run: 18, or the version a module asks for. Who stops one takes its own."""
    with server(getattr(request, "param", 18)) as running:
        yield running


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A server this test may do anything to."""
    with server() as running:
        yield running


@pytest.fixture
def address(request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[str]:
    """A database nobody else uses. Its tables are there, unless the test is marked `empty_database`."""
    empty = request.node.get_closest_marker("empty_database") is not None
    own = postgres.new_database() if empty else postgres.new_migrated_database()
    yield own
    postgres.drop(own)


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(address, tmp_path) as own:
        yield own
