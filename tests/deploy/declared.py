"""Read the files of a deployment as the platforms do."""

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from app.fleet.api_keys import make_key
from app.fleet.template.record import Record
from app.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
# The name of the service, which `flotilla rename` changes.
NAME = Record.read(ROOT).name
# Secrets are in no file. These have the form that docs/guides/deploy.md requires.
ADDRESS = "postgresql://flotilla_run:secret@database.example:5432/flotilla"
API_KEYS = make_key("test", "admin")[1]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, continued lines joined, comments left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", "")
    return [(keyword, rest.strip()) for keyword, _, rest in (line.partition(" ") for line in whole.splitlines())]


def last(keyword: str) -> str:
    """Return the last instruction of its kind, which is the one that applies."""
    return [rest for each, rest in instructions() if each == keyword][-1]


def settings_under(environment: Mapping[str, str]) -> Settings:
    """Return the settings of a container with this environment, added to that of the image. Invalid settings raise."""
    image = dict(each.split("=", 1) for each in shlex.split(last("ENV")))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**image, **environment}.items():
            if name.startswith(("FLOTILLA_", "DATABASE_")):
                patch.setenv(name, value)
        return Settings.load()
