"""A clone with code of its own takes a later release of the template, on a database that an old instance still uses.

The template is this checkout, in two releases: the later one changes the machinery, adds a migration of the fleet, and
changes files that a clone changes too. The clone has the action, the routes and the table of the walkthrough, and has
deleted the example.
"""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from tests.support import clones, guides
from tests.support.fleet import NO_TRUST, environment
from tests.support.postgres import eventually, free_port
from tests.support.tools import program

pytestmark = pytest.mark.template

RELEASES = ("100.1.0", "100.2.0")
# What a reader replaces in docs/guides/update.md.
PLACEHOLDER = "<repository of the template>"
MIGRATION = '''"""An index for the test of updates.

Revision fleet_8888, after {previous}.
"""

from alembic import op

revision = "fleet_8888"
down_revision = "{previous}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("instances_trial", "instances", ["hostname"])


def downgrade() -> None:
    op.drop_index("instances_trial", table_name="instances")
'''
# The tests of the clone that an update could break, and that need no minute.
CHECKS = (
    "tests/mine",
    "tests/unit/test_golden_statements.py",
    "tests/unit/test_openapi.py",
    "tests/unit/test_settings.py",
    "tests/integration/test_migrations.py",
)


class Checkout:
    """A folder with a checkout, in which commands run on one database."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self._address = address
        self._stack = contextlib.ExitStack()

    def run(self, *command: str, **env: str) -> str:
        """Run a Python module of this checkout, and return its output."""
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=self.folder, env=self.environment(env), timeout=280,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def git(self, *command: str) -> str:
        return subprocess.run(
            ["git", *command], cwd=self.folder, env=self.environment({}), capture_output=True, text=True, check=True
        ).stdout

    def serve(self, name: str) -> httpx.Client:
        """Start an instance from this checkout, and wait until it is ready."""
        port = free_port()
        with (self.folder.parent / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve", "--port", str(port), "--name", name],
                cwd=self.folder, env=self.environment({"FLOTILLA_MIGRATE_ON_START": "false"}),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        client = self._stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=NO_TRUST))

        def is_ready() -> bool:
            try:
                return client.get("/health/ready").status_code == 200
            except httpx.TransportError:
                assert process.poll() is None, (self.folder.parent / f"{name}.log").read_text()
                return False

        eventually(is_ready, within=60)
        return client

    def close(self) -> None:
        """End all instances."""
        self._stack.close()

    def environment(self, env: dict[str, str]) -> dict[str, str]:
        identity = {
            f"GIT_{role}_{key}": "tester@fleet.example" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")
        }
        return environment(self._address, {"PYTHONPATH": str(self.folder), "PYTHONWARNINGS": "", **identity, **env})

    def edit(self, path: str, old: str, new: str) -> None:
        text = (self.folder / path).read_text()
        assert old in text, f"{path} has no {old!r}"
        (self.folder / path).write_text(text.replace(old, new, 1))


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """The repository of the template, with two releases."""
    program("git")
    made = Checkout(tmp_path / "template", "")
    clones.copy_checkout(made.folder)
    write_record(made, RELEASES[0])
    clones.commit_all(made.folder, "the first release", new=True)
    made.git("tag", f"v{RELEASES[0]}")
    write_record(made, RELEASES[1])
    schema = "app/fleet/db/schema/cluster.py"
    column = '    Column("hostname", Text, nullable=False),\n'
    made.edit(schema, column, column + '    Index("instances_trial", "hostname"),\n')
    previous = max(path.stem for path in (made.folder / "alembic/versions/fleet").glob("*.py"))
    (made.folder / "alembic/versions/fleet/fleet_8888_trial.py").write_text(
        MIGRATION.format(previous="_".join(previous.split("_")[:2]))
    )
    with (made.folder / "app/fleet/duration.py").open("a") as machinery:
        machinery.write("\n\n# Of the later release.\n")
    made.edit("pyproject.toml", "[tool.fastapi]", "[tool.trial]\nlater = true\n\n[tool.fastapi]")
    made.edit("README.md", "## Read on", "A sentence of the later release.\n\n## Read on")
    made.edit(
        "CHANGELOG.md", "## Unreleased", f"## {RELEASES[1]}\n\n- Trial.\n\n### Manual steps\n\nNone.\n\n## Unreleased"
    )
    with (made.folder / "Makefile").open("a") as makefile:
        makefile.write("\ntrial:  ## Of the later release\n")
    clones.commit_all(made.folder, "the second release")
    made.git("tag", f"v{RELEASES[1]}")
    return made.folder


def write_record(checkout: Checkout, release: str) -> None:
    record = checkout.folder / ".flotilla-template"
    lines = [
        f'release = "{release}"' if line.startswith("release") else line for line in record.read_text().splitlines()
    ]
    record.write_text("\n".join(lines) + "\n")


@pytest.fixture
def clone(template: Path, tmp_path: Path, address: str) -> Iterator[Checkout]:
    """A clone of the first release, begun as docs/guides/begin.md says, with the code of the walkthrough.

    It has its own README, and has deleted the example, most pages and the tests of the template itself.
    """
    own = Checkout(tmp_path / "harbour-desk", address)
    get, _, *then = guides.program("begin", "sh", "git clone").replace(PLACEHOLDER, str(template)).splitlines()
    get = re.sub(r"--branch \S+", f"--branch v{RELEASES[0]}", get)
    subprocess.run(shlex.split(get), cwd=tmp_path, check=True, capture_output=True)
    for command in then:
        name, *arguments = shlex.split(command)
        if name == "git":
            own.git(*arguments)
        elif name.endswith("/flotilla"):
            own.run("app", *arguments)
    clones.delete_example(own.folder)
    clones.write_walkthrough(own.folder)
    own.run("ruff", "check", "--no-cache", "--quiet", "--fix", "app/models.py")
    own.edit("README.md", "# Harbour desk\n", "# Harbour desk\n\nOur own sentence.\n")
    subprocess.run(guides.program("begin", "sh", "git rm"), shell=True, cwd=own.folder, check=True)  # noqa: S602
    for folder in ("docs/decisions", "docs/explanation", "docs/reference", "docs/start", "examples", "benchmarks"):
        shutil.rmtree(own.folder / folder)
    own.run("app", "migrate")
    own.run("alembic", "revision", "--autogenerate", "-m", "soundings", "--head", "app@head",
            "--version-path", "alembic/versions/app")  # fmt: skip
    own.run("app", "migrate")
    clones.commit_all(own.folder, "soundings")
    yield own
    own.close()


@pytest.fixture
def before(tmp_path: Path, address: str) -> Iterator[Checkout]:
    """A copy of the clone, from which the old instance is started."""
    own = Checkout(tmp_path / "before", address)
    yield own
    own.close()


@pytest.mark.long
@pytest.mark.empty_database
def test_a_clone_takes_a_later_release_and_its_instances_work_beside_those_of_before(
    template: Path, clone: Checkout, before: Checkout, address: str
) -> None:
    """The test takes long because it runs the tests of the clone."""
    shutil.copytree(clone.folder, before.folder, symlinks=True)
    old = before.serve("old")

    look, update = guides.program("update", "sh", "--dry-run").replace(PLACEHOLDER, str(template)).splitlines()
    for command in (look, update):
        shown = clone.run("app", *shlex.split(command)[1:])
    assert f"## {RELEASES[1]}" in shown
    assert "in conflict" not in shown
    clone.git("switch", "--quiet", "main")
    clone.git("merge", "--quiet", f"flotilla-update-{RELEASES[1]}")
    check_files(clone)

    clone.run("app", "migrate")
    clone.run("ruff", "check", "--no-cache", "--quiet", ".")
    clone.run("ruff", "format", "--no-cache", "--quiet", "--check", ".")
    clone.run("pytest", "-q", "-p", "no:cacheprovider", *CHECKS)

    new = clone.serve("new")
    for client in (old, new):
        view = {each["name"]: each["state"] for each in client.get("/health/instances").json()["instances"]}
        assert view == {"old": "ready", "new": "ready"}
    check_runs(old, new, address)


def check_files(clone: Checkout) -> None:
    assert (clone.folder / "alembic/versions/fleet/fleet_8888_trial.py").exists()
    assert "Of the later release" in (clone.folder / "app/fleet/duration.py").read_text()
    assert "trial:  ## Of the later release" in (clone.folder / "Makefile").read_text()
    readme = (clone.folder / "README.md").read_text()
    assert readme.startswith("# Harbour desk\n\nOur own sentence.\n")
    assert "A sentence of the later release." in readme
    project = (clone.folder / "pyproject.toml").read_text()
    assert 'name = "harbour-desk"' in project
    assert "later = true" in project
    assert not (clone.folder / "docs/reference").exists()
    assert not (clone.folder / "app/actions/mailings.py").exists()
    assert not (clone.folder / "alembic/versions/app/app_0002_mailings.py").exists()
    assert (clone.folder / "app/actions/soundings.py").exists()


def check_runs(old: httpx.Client, new: httpx.Client, address: str) -> None:
    """Order soundings at both instances, until both have executed some."""
    ordered: list[dict[str, Any]] = []

    def executed_by() -> set[str]:
        with psycopg.connect(address, autocommit=True) as session:
            rows = session.execute("SELECT DISTINCT instance FROM flotilla.finished_runs WHERE state = 'succeeded'")
            return {name for (name,) in rows}

    def both_have_executed() -> bool:
        for client in (old, new):
            answer = client.post("/soundings", json={"place": f"place {len(ordered)}", "times": 1})
            assert answer.status_code == 202, answer.text
            ordered.append(answer.json())
        return executed_by() == {"old", "new"}

    eventually(both_have_executed, every=0.5)

    def all_are_found() -> bool:
        return len(new.get("/soundings").json()) == len(ordered)

    eventually(all_are_found)
    assert len(old.get("/soundings").json()) == len(ordered)
