"""Web pages of other origins: which may use this service in a browser (CORS), and what the others cannot do.

A page of an origin in `FLOTILLA_CORS_ORIGINS` may send any request and read the answer; the browser asks for that
before (`OPTIONS`), and is answered without a key. Cookies are never allowed: a caller proves who it is with a header.

Where the browser itself could prove it for a page that does not know it (a service without API keys, or a sign-in
behind a proxy that reads cookies), a page of another origin changes nothing: its requests are refused here. Programs
that are no browsers send none of these headers.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp

from app.fleet.edge.problems import SAFE_METHODS, Forbidden
from app.fleet.settings import FleetSettings

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
# The headers of responses that a page may read, beside those that it may read anyway.
EXPOSED = ("Location", "Retry-After", "X-Request-Id", "ETag", "Allow", "WWW-Authenticate")


def with_cors(app: ASGIApp, settings: FleetSettings) -> ASGIApp:
    """Return the application, or what adds the headers for the allowed origins to its responses."""
    if not settings.cors_origins:
        return app
    # Any header may be sent, so also those of a service's own routes: an allowed origin is trusted with them.
    return CORSMiddleware(
        app,
        allow_origins=settings.cors_origins,
        allow_methods=METHODS,
        allow_headers=["*"],
        expose_headers=EXPOSED,
    )


def refuse_cross_site(request: Request, settings: FleetSettings) -> None:
    """Refuse a request that changes something and that a page of another origin has made the browser send."""
    headers: Headers = request.headers
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if request.method in SAFE_METHODS or origin in settings.cors_origins:
        return
    if site is None and origin is not None:
        site = "same-origin" if urlsplit(origin).netloc == headers.get("host") else "cross-site"
    if site == "cross-site":
        raise Forbidden(
            "a page of another site sent this request, and only this service's own pages may change anything: to "
            "allow the pages of an origin, name it in FLOTILLA_CORS_ORIGINS"
        )
