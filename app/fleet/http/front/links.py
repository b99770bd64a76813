"""The page at `/`, for a browser that opens the address of the service. It needs no key.

The page has no state and no secret, and it is the same at every instance: the name of the service, and links to its
pages, as far as they exist.
"""

from html import escape

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse
from starlette.routing import Match

POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
LINKS = {
    "/docs": "the API, to read and to try",
    "/dashboard": "the instances, actions and runs of this service",
    "/health/ready": "whether this instance takes requests",
    "/health/instances": "all instances, and what is wrong with them",
    "/metrics": "metrics for Prometheus",
    "/problems": "every kind of error",
}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
</head>
<body>
<h1>{title}</h1>
<ul>
{links}
</ul>
</body>
</html>
"""

router = APIRouter(include_in_schema=False)


@router.get("/")
async def show_links(request: Request) -> HTMLResponse:
    """Link to what this service has. A service's own route at `/` is found first."""
    links = [
        f'<li><a href="{path}">{path}</a>: {text}</li>' for path, text in LINKS.items() if has_route(request.app, path)
    ]
    html = PAGE.format(title=escape(request.app.title), links="\n".join(links))
    return HTMLResponse(html, headers={"content-security-policy": POLICY})


def has_route(app: FastAPI, path: str) -> bool:
    asked = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": []}
    return any(route.matches(dict(asked))[0] is Match.FULL for route in app.router.routes)
