"""Commands for clients of the service: `key` makes an API key, `openapi` writes the document that describes the API."""

import importlib
import json
import warnings
from typing import Annotated, Any

import typer

from app.fleet.api_keys import KEY, Scope, make_key
from app.fleet.cli.terminal import load_settings, write
from app.fleet.errors import SettingsError
from app.fleet.role import Role


def key(
    name: Annotated[str, typer.Argument(help="Name of the key, such as its client. Audit records show it.")],
    scope: Annotated[Scope, typer.Option(help="What the key allows; each scope includes the one before it.")] = "read",
) -> None:
    """Make an API key: print the key, which is shown only once, and its line for FLOTILLA_API_KEYS."""
    secret, line = make_key(name, scope)
    if not KEY.fullmatch(line):
        raise SettingsError(
            f"{name!r} is not a valid name of a key: use up to 64 letters, digits, dots, hyphens and underscores"
        )
    write(f"key for the client, shown only this once:\n  {secret}")
    write(f"line for FLOTILLA_API_KEYS (separate several with commas):\n  {line}")


def openapi(
    output: Annotated[
        typer.FileTextWrite,
        typer.Option(metavar="FILE", encoding="utf-8", help="File to write. `-` is the standard output."),
    ] = "-",  # type: ignore[assignment]  # typer opens it
) -> None:
    """Write the OpenAPI document of the service, from which clients are generated. Needs no database."""
    # A worker does not serve the API, and its document would not have it.
    settings = load_settings().model_copy(update={"role": Role.ALL})
    service = importlib.import_module("app.main").create_app(settings)
    output.write(json.dumps(document_of(service), indent=2, ensure_ascii=False) + "\n")


def document_of(service: Any) -> Any:
    """Return the document; refuse what FastAPI only warns of: two operations with the same id."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            return service.openapi()
        except UserWarning as warning:
            raise SettingsError(f"{warning}: rename one of the functions, or set `operation_id` of its route") from None
