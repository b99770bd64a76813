"""The Dockerfile: the image receives signals, runs without privileges, and contains the locked packages.

`make image-test` shows that it can be built and serves, but needs root and a minute; these tests need neither.
"""

import json
import re
import tomllib
from pathlib import PurePosixPath

from app.fleet.db import migrations
from tests.deploy.declared import ROOT, instructions, last, settings_under

DATABASE = {"DATABASE_URL": "postgresql://database.example/flotilla", "FLOTILLA_API_KEYS": f"me:admin:{'0' * 64}"}


def test_the_service_is_process_1_and_receives_the_signals() -> None:
    """A command that is not a list would be run by a shell, which does not pass on SIGTERM."""
    assert json.loads(last("CMD")) == ["flotilla", "serve"]
    assert not [keyword for keyword, _ in instructions() if keyword in {"ENTRYPOINT", "STOPSIGNAL"}]


def test_the_image_runs_as_a_numeric_user_that_is_not_root() -> None:
    user, group = last("USER").split(":")
    assert int(user) >= 1000
    assert int(group) >= 1000


def test_all_packages_are_installed_from_the_lock_file_with_hashes() -> None:
    installing = [rest for keyword, rest in instructions() if keyword == "RUN" and "pip install" in rest]
    assert len(installing) == 1
    assert "--require-hashes" in installing[0]
    assert "--requirement /tmp/requirements.lock" in installing[0]
    # Building a source package would run the code of its author, and code that the build downloads.
    assert "--only-binary=:all:" in installing[0]


def test_the_base_image_is_declared_once_and_new_enough() -> None:
    bases = [rest.split()[0] for keyword, rest in instructions() if keyword == "FROM"]
    assert set(bases) == {"${BASE}"}
    (base, _) = [rest for keyword, rest in instructions() if keyword == "ARG"]
    found = re.fullmatch(r"BASE=python:(\d+)\.(\d+)-slim", base)
    assert found is not None
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert required == ">=3.11"
    assert (int(found[1]), int(found[2])) >= (3, 11)


def test_the_image_is_set_to_production_and_listens_on_all_interfaces() -> None:
    settings = settings_under(DATABASE)
    assert settings.production
    assert settings.host == "0.0.0.0"  # noqa: S104 — in a container, every interface is the container's
    assert settings.port == int(last("EXPOSE"))


def test_the_migrations_are_at_the_path_where_the_service_reads_them() -> None:
    """The image has the layout of the checkout, which `migrations.ROOT` expects."""
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


def test_only_files_that_the_dockerfile_copies_are_sent_to_the_builder() -> None:
    """A `.env` with secrets, or any other local file, does not get into a layer of the image."""
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
