"""Fixtures for pytest. A `conftest.py` imports them:

from app.fleet.testing.fixtures import *

instance             one instance of the service in the test process, on a database of its own
instance_settings    override it to give the instance settings: a dictionary by the names of the fields
databases            the server of this process of the tests; TEST_DATABASE_URL names another one
anyio_backend        the event loop of `async` tests is asyncio's
"""

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

from app.fleet.errors import EmbeddedUnavailable
from app.fleet.settings import PREFIX
from app.fleet.testing import databases as servers
from app.fleet.testing.instance import Instance, running_instance

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "app.fleet.testing.fixtures needs pytest: install the development dependencies"
    ) from error

__all__ = ["anyio_backend", "databases", "instance", "instance_settings"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def databases() -> Iterator[servers.Databases]:
    """The server of this process of the tests."""
    try:
        with servers.databases(os.environ.get("TEST_DATABASE_URL")) as own:
            yield own
    except EmbeddedUnavailable as error:
        pytest.fail(f"there is no PostgreSQL for the tests: {error}", pytrace=False)


@pytest.fixture
def instance_settings() -> dict[str, Any]:
    return {}


@pytest.fixture
async def instance(
    anyio_backend: str,  # noqa: ARG001 — with it, a test with this fixture may be `async`
    databases: servers.Databases,
    instance_settings: dict[str, Any],
) -> AsyncIterator[Instance]:
    """One instance of the service, without settings from the shell and from `.env`, on a new database."""
    address = databases.create()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in list(os.environ):
                if name.startswith((PREFIX, "DATABASE_")):
                    patch.delenv(name)
            async with running_instance(address, **instance_settings) as own:
                yield own
    finally:
        databases.drop(address)
