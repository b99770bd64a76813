"""`flotilla key`: make an API key. The key itself is printed once and stored nowhere."""

from typing import Annotated

import typer

from app.fleet.api_keys import KEY, Scope, make_key
from app.fleet.cli.terminal import write
from app.fleet.errors import SettingsError


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
