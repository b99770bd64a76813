"""The application: `create_app` puts the fleet and your routes together."""

import sys
from pathlib import Path

from fastapi import Depends, FastAPI
from starlette.types import ASGIApp

from app import __version__
from app.fleet import dashboard
from app.fleet.edge import elsewhere, error_handlers, openapi, problems
from app.fleet.edge.auth import needs
from app.fleet.edge.context import Context
from app.fleet.edge.middleware import Edge, is_not_traced
from app.fleet.errors import SettingsError
from app.fleet.http import actions, events, health, locks, metrics, runs
from app.fleet.http.front import files, links
from app.fleet.lifespan import lifespan
from app.fleet.resources.resource import declared_in
from app.fleet.settings import FleetSettings
from app.fleet.telemetry import logs, tracing
from app.settings import Settings


class Service(FastAPI):
    """FastAPI inside the edge, which also handles what FastAPI's own error handling raises."""

    def build_middleware_stack(self) -> ASGIApp:
        return Edge(super().build_middleware_stack(), self.state.fleet)


def create_app(settings: FleetSettings | None = None) -> FastAPI:
    # Imported here, so that an invalid action or resource is reported like an invalid setting (see below).
    from app import routes, startup

    settings = settings or Settings.load()
    logs.set_up(as_json=settings.logs_as_json, level=settings.log_level, namespace=settings.namespace)
    tracing.set_defaults(settings.namespace)
    app = Service(
        title="Flotilla",
        version=__version__,
        lifespan=lifespan,
        # In production the API's schema is not published. Without a schema there are no pages of it either.
        openapi_url="/openapi.json" if settings.role.serves and not settings.production else None,
        generate_unique_id_function=openapi.operation_id,
        # A model that is a body and a response has one name.
        separate_input_output_schemas=False,
        # A redirect would lead to the host that the request names, which a client can forge. /actions/ does not exist.
        redirect_slashes=False,
        # Its own handlers of errors would send their texts, which may have secrets.
        telemetry={"auto_configure": True, "logs": False, "exclude": is_not_traced},
    )
    sign_in = getattr(startup, "sign_in", None)
    app.state.fleet = Context(settings, settings.version or __version__, declared_in(startup), sign_in)
    error_handlers.install(app)
    openapi.install(app, keys=sign_in is None)
    for module in (problems, health, metrics):
        app.include_router(module.router)
    if settings.role.serves:
        for module in (actions, runs, events, locks):
            app.include_router(module.router)
        # Without this line there is no dashboard.
        app.include_router(dashboard.router)
        app.include_router(routes.router, dependencies=[Depends(needs())])
        app.include_router(routes.public)
        # The files in app/static, if there are any, and the page of links, unless one of your routes is at `/`.
        files.serve(app, Path(__file__).parent / "static")
        app.include_router(links.router)
    else:
        app.include_router(elsewhere.router)
    return app


try:
    app = create_app()
except SettingsError as error:
    # Under `uvicorn app.main:app`, a traceback would bury the message that says what to do.
    sys.exit(f"flotilla: {error}")
