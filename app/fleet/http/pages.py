"""Pages and files without a key: the links at `/`, and what a service puts into `app/static`.

The page of links is what a browser shows at the address of the service. It has no state and no secret, and it is the
same at every instance: the name of the service, and links to its pages.

Files are sent with `ETag` and `Cache-Control: no-cache`: a browser keeps them, and asks each time whether they have
changed. In a deploy, two releases serve them side by side. A path outside of the folder is not found, whatever it is
made of, and neither is a link that leads out of it.
"""

from html import escape
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.routing import Match

STATIC = "/static"
CACHE_CONTROL = "no-cache"
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


class Files(StaticFiles):
    def file_response(self, *args: object, **options: object) -> Response:
        response = super().file_response(*args, **options)  # type: ignore[arg-type]  # they are passed on
        response.headers["cache-control"] = CACHE_CONTROL
        return response


def serve_files(app: FastAPI, folder: Path) -> None:
    """Serve the files of this folder at `/static`, without a key, if there are any."""
    if folder.is_dir() and any(folder.iterdir()):
        app.mount(STATIC, Files(directory=folder), name="static")
