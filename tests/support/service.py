"""The service in this process, with a real database: for tests of the answers of one instance."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from fastapi import FastAPI

from app.fleet.edge.context import Context
from app.fleet.settings import FleetSettings
from app.main import create_app
from app.settings import Settings
from tests.support import trial_routes

assert trial_routes.router.routes


@dataclass(frozen=True)
class Running:
    app: FastAPI
    client: httpx.AsyncClient
    context: Context


@asynccontextmanager
async def service(address: str, kind: type[FleetSettings] = Settings, /, **settings: object) -> AsyncIterator[Running]:
    """Run the service, including its lifespan.

    A caller may wait for a connection for a minute: on a busy machine that is no failure.
    """
    usual = {"drain_delay": 0.0, "drain_timeout": 2.0, "pause_timeout": 1.0, "pool_timeout": 60.0}
    app = create_app(kind.load(database_url=address, **{**usual, **settings}))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://service") as client,
    ):
        yield Running(app, client, app.state.fleet)


async def is_ready(running: Running) -> bool:
    """A probe waits for the database for a second only: on a busy machine, one of them may be answered with 503."""
    return (await running.client.get("/health/ready")).status_code == 200
