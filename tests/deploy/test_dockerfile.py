"""The Dockerfile makes an image that is told to stop, owns nothing, and contains what was locked.

That it builds and serves is shown by `make image-test`, which needs root and takes a minute; this needs neither.
"""

import json
import re
import tomllib
from pathlib import PurePosixPath

from app.fleet.db import migrations
from tests.deploy.declared import ROOT, instructions, last, settings_under

DATABASE = {"DATABASE_URL": "postgresql://database.example/flotilla", "FLOTILLA_API_KEYS": f"me:admin:{'0' * 64}"}


def test_the_service_is_process_1_and_has_the_signals() -> None:
    """A command that is not a list is run by a shell, which keeps SIGTERM for itself."""
    assert json.loads(last("CMD")) == ["flotilla", "serve"]
    assert not [keyword for keyword, _ in instructions() if keyword in {"ENTRYPOINT", "STOPSIGNAL"}]


def test_it_runs_as_a_user_with_a_number_who_is_not_root() -> None:
    user, group = last("USER").split(":")
    assert int(user) >= 1000
    assert int(group) >= 1000


def test_what_is_installed_was_locked_with_its_hash() -> None:
    installing = [rest for keyword, rest in instructions() if keyword == "RUN" and "pip install" in rest]
    assert len(installing) == 1
    assert "--require-hashes" in installing[0]
    assert "--requirement /tmp/requirements.lock" in installing[0]
    # A source package would run its author's code, with what its build downloads on its own.
    assert "--only-binary=:all:" in installing[0]


def test_the_base_is_declared_once_and_new_enough() -> None:
    bases = [rest.split()[0] for keyword, rest in instructions() if keyword == "FROM"]
    assert set(bases) == {"${BASE}"}
    found = re.fullmatch(r"BASE=python:(\d+)\.(\d+)-slim", last("ARG"))
    assert found is not None
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert wanted == ">=3.11"
    assert (int(found[1]), int(found[2])) >= (3, 11)


def test_it_is_set_to_production_and_listens_to_other_hosts() -> None:
    settings = settings_under(DATABASE)
    assert settings.production
    assert settings.host == "0.0.0.0"  # noqa: S104 — in a container, every interface is the container's
    assert settings.port == int(last("EXPOSE"))


def test_the_migrations_are_where_the_service_looks_for_them() -> None:
    """The checkout's layout, which `migrations.ROOT` stands for, is the image's."""
    home = PurePosixPath(last("WORKDIR"))
    copied = {}
    for keyword, rest in instructions():
        if keyword == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            for source in sources:
                copied[source] = PurePosixPath(target) / (source if target.endswith("/") else "")
    needed = ["app", "alembic", "alembic.ini"]
    assert [(migrations.ROOT / each).exists() for each in needed] == [True] * 3
    assert [copied.get(each) for each in needed] == [home / each for each in needed]


def test_nothing_is_sent_to_the_builder_that_is_not_named() -> None:
    """A `.env` with secrets, or anything else that lies about, stays out of the image's layers."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    sent = {each.removeprefix("!") for each in patterns if each.startswith("!")}
    assert patterns[0] == "*"
    needed = {
        source
        for keyword, rest in instructions()
        if keyword == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert sent == needed
