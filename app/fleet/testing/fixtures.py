"""Fixtures for pytest. A `conftest.py` imports them:

from app.fleet.testing.fixtures import *

instance             one instance of the service in the test process, on a database of its own
instance_settings    override it to give the instance settings: a dictionary by the names of the fields
instance_resources   override it to replace resources of `app/startup.py` by others of the same types
databases            the server of this process of the tests; TEST_DATABASE_URL names another one
anyio_backend        the event loop of `async` tests is asyncio's
"""

import importlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from app.fleet.errors import EmbeddedUnavailable, ResourceInvalid
from app.fleet.resources.resource import Resource, name_of
from app.fleet.settings import PREFIX
from app.fleet.testing import databases as servers
from app.fleet.testing.instance import Instance, running_instance

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "app.fleet.testing.fixtures needs pytest: install the development dependencies"
    ) from error

__all__ = ["anyio_backend", "databases", "instance", "instance_resources", "instance_settings"]


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
def instance_resources() -> Sequence[Resource[Any]]:
    return ()


@pytest.fixture
async def instance(
    anyio_backend: str,  # noqa: ARG001 — with it, a test with this fixture may be `async`
    databases: servers.Databases,
    instance_settings: dict[str, Any],
    instance_resources: Sequence[Resource[Any]],
) -> AsyncIterator[Instance]:
    """One instance of the service, without settings from the shell and from `.env`, on a new database."""
    address = databases.create()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in list(os.environ):
                if name.startswith((PREFIX, "DATABASE_")):
                    patch.delenv(name)
            replace_resources(patch, instance_resources)
            async with running_instance(address, **instance_settings) as own:
                yield own
    finally:
        databases.drop(address)


def replace_resources(patch: pytest.MonkeyPatch, given: Sequence[Resource[Any]]) -> None:
    """Replace the resources of `app/startup.py` that have the types of these."""
    # By name: the fleet imports nothing of the service.
    startup = importlib.import_module("app.startup")
    for each in given:
        names = [
            name for name, value in vars(startup).items() if isinstance(value, Resource) and value.kind == each.kind
        ]
        if not names:
            raise ResourceInvalid(
                f"{each.location} replaces no resource: app/startup.py has none of the type {name_of(each.kind)}"
            )
        for name in names:
            patch.setattr(startup, name, each)
