"""API keys: made here, kept nowhere."""

from typing import Annotated

import typer

from app.fleet.api_keys import KEY, Scope, make_key
from app.fleet.cli.terminal import say
from app.fleet.errors import SettingsError


def key(
    name: Annotated[str, typer.Argument(help="Whose key this is; it appears in the settings only.")],
    scope: Annotated[Scope, typer.Option(help="What it may do; each scope includes the former.")] = "read",
) -> None:
    """Make an API key: the key itself, shown once, and the line for FLOTILLA_API_KEYS."""
    secret, line = make_key(name, scope)
    if not KEY.fullmatch(line):
        raise SettingsError(f"{name!r} is no name for a key: up to 64 letters, digits, dots, hyphens and underscores")
    say(f"key, for the client, shown only now:\n  {secret}")
    say(f"line, to add to FLOTILLA_API_KEYS (commas between several):\n  {line}")
