"""Files: what a service puts into `app/static` is served at `/static`, without a key.

A file is sent with `ETag` and `Cache-Control: no-cache`: a browser keeps it, and asks each time whether it has changed,
because two releases serve it side by side during a deploy. A path outside of the folder is not found, whatever it is
made of, and neither is a symbolic link that leads out of it.
"""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles

STATIC = "/static"
CACHE_CONTROL = "no-cache"


class Files(StaticFiles):
    def file_response(self, *args: object, **options: object) -> Response:
        response = super().file_response(*args, **options)  # type: ignore[arg-type]  # they are passed on
        response.headers["cache-control"] = CACHE_CONTROL
        return response


def serve(app: FastAPI, folder: Path) -> None:
    """Serve the files of this folder, if there are any."""
    if folder.is_dir() and any(folder.iterdir()):
        app.mount(STATIC, Files(directory=folder), name="static")
