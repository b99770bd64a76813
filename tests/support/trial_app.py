"""The service with the trial routes, for servers that import an application by name."""

from tests.support import trial_routes

assert trial_routes.router.routes

from app.main import app  # noqa: E402 — the routes must exist before the application is created

__all__ = ["app"]
