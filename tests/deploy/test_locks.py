"""`make lock` adds packages and upgrades no other, `make upgrade` waits for a week, `make setup` sees what is missing.

docs/guides/your-own.md tells how a package is added. The packages come from an index on this machine, which says when
each version was uploaded.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.deploy.declared import ROOT
from tests.support.tools import program

LOCKS = ("requirements.lock", "requirements-dev.lock", "requirements-bench.lock")
# The type of an index's pages. In one piece, tests/unit/test_documentation.py would take it for the name of a host.
SIMPLE = f"application/vnd.{'pypi'}.simple.v1+json"
LONG_AGO = datetime.now(UTC) - timedelta(days=100)
LAST_WEEK = datetime.now(UTC) - timedelta(days=8)
YESTERDAY = datetime.now(UTC) - timedelta(days=1)


def metadata(name: str, version: str) -> bytes:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()


def digest(name: str, version: str) -> str:
    """Return the hash of a package. Nothing is installed, so the package itself does not exist."""
    return hashlib.sha256(f"{name} {version}".encode()).hexdigest()


@dataclass
class Index:
    """An index of packages, with the versions of each and the times at which they were uploaded."""

    packages: dict[str, dict[str, datetime]] = field(default_factory=dict)
    port: int = 0

    def add(self, name: str, **versions: datetime) -> None:
        """Add versions: `v1_0=LAST_WEEK` is 1.0, uploaded last week."""
        uploaded = {version.removeprefix("v").replace("_", "."): instant for version, instant in versions.items()}
        self.packages.setdefault(name, {}).update(uploaded)

    def page(self, name: str) -> bytes | None:
        if name not in self.packages:
            return None
        files = [
            {
                "filename": f"{name}-{version}-py3-none-any.whl",
                "url": f"http://127.0.0.1:{self.port}/files/{name}/{version}/{name}-{version}-py3-none-any.whl",
                "hashes": {"sha256": digest(name, version)},
                "core-metadata": {"sha256": hashlib.sha256(metadata(name, version)).hexdigest()},
                "upload-time": instant.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            for version, instant in self.packages[name].items()
        ]
        return json.dumps({"meta": {"api-version": "1.1"}, "name": name, "files": files, "versions": []}).encode()


@pytest.fixture
def index() -> Iterator[Index]:
    own = Index()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = self.path.strip("/").split("/")
            content = own.page(parts[1]) if parts[0] == "simple" else metadata(parts[1], parts[2])
            self.send_response(200 if content else 404)
            self.send_header("Content-Type", SIMPLE)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        own.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield own
        server.shutdown()


class Project:
    """A checkout with the scripts and the Makefile, and dependencies of its own."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "locks", folder / "scripts")
        shutil.copy(ROOT / "Makefile", folder)
        (folder / ".venv").mkdir()
        (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
        for name in LOCKS:
            (folder / name).touch()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "MAKE"))}
        kept |= {"UV_DEFAULT_INDEX": f"http://127.0.0.1:{index.port}/simple", "UV_CACHE_DIR": str(folder / "cache")}
        self.env = {**kept, "UV_NO_CONFIG": "1", "UV_PYTHON": sys.executable}

    def declare(self, *dependencies: str, comment: str = "") -> None:
        (self.folder / "pyproject.toml").write_text(
            f'[project]\nname = "trial"\nversion = "1"\nrequires-python = ">=3.11"\n{comment}\n'
            f"dependencies = {json.dumps(dependencies)}\n\n"
            '[dependency-groups]\ndev = ["tool"]\nbench = [{ include-group = "dev" }, "peer"]\n\n'
            "[tool.uv]\nmanaged = false\n"
        )

    def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, self.folder / "scripts" / "locks", command],
            cwd=self.folder, env=self.env, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def succeed(self, command: str) -> str:
        done = self.run(command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def lock(self, name: str = LOCKS[0]) -> list[str]:
        """Return the packages of a lock file with their versions."""
        lines = (self.folder / name).read_text().splitlines()
        return [line.split()[0] for line in lines if "==" in line]


@pytest.fixture
def project(index: Index, tmp_path: Path) -> Project:
    """A project whose lock files were written when each package had one version."""
    for name in ("one", "two", "tool", "peer"):
        index.add(name, v1_0=LONG_AGO)
    made = Project(tmp_path, index)
    made.declare("one")
    made.succeed("write")
    return made


def test_each_lock_file_has_the_packages_of_the_one_before_it(project: Project) -> None:
    assert [project.lock(name) for name in LOCKS] == [
        ["one==1.0"], ["one==1.0", "tool==1.0"], ["one==1.0", "peer==1.0", "tool==1.0"],
    ]  # fmt: skip


def test_a_lock_file_has_hashes_and_no_address(project: Project, index: Index) -> None:
    text = (project.folder / LOCKS[0]).read_text()
    assert f"--hash=sha256:{digest('one', '1.0')}" in text
    assert str(index.port) not in text
    assert "://" not in text


def test_a_declared_package_is_added_and_no_other_is_upgraded(project: Project, index: Index) -> None:
    index.add("one", v1_1=LONG_AGO)
    project.declare("one", "two")
    project.succeed("write")
    assert project.lock() == ["one==1.0", "two==1.0"]


def test_a_package_that_is_no_longer_declared_is_removed(project: Project) -> None:
    project.declare("two")
    project.succeed("write")
    assert project.lock() == ["two==1.0"]


def test_a_version_that_no_longer_fits_is_replaced(project: Project, index: Index) -> None:
    index.add("one", v1_1=LONG_AGO)
    project.declare("one>1.0")
    project.succeed("write")
    assert project.lock() == ["one==1.1"]


def test_an_upgrade_takes_what_is_older_than_a_week_and_nothing_younger(project: Project, index: Index) -> None:
    index.add("one", v1_1=LAST_WEEK, v1_2=YESTERDAY)
    assert project.succeed("upgrade") == "one: 1.0 -> 1.1\n"
    assert [project.lock(name)[0] for name in LOCKS] == ["one==1.1"] * 3


def test_an_upgrade_keeps_a_version_that_is_younger_than_a_week(project: Project, index: Index) -> None:
    index.add("one", v1_1=LAST_WEEK, v1_2=YESTERDAY)
    index.add("two", v1_1=LAST_WEEK)
    project.declare("one>=1.2", "two")
    project.succeed("write")
    index.add("one", v1_3=YESTERDAY + timedelta(hours=1))
    index.add("two", v1_2=LAST_WEEK)
    assert project.succeed("upgrade") == "two: 1.1 -> 1.2\n"
    assert project.lock() == ["one==1.2", "two==1.2"]


def test_an_impossible_declaration_leaves_the_lock_files_as_they_were(project: Project) -> None:
    before = [(project.folder / name).read_text() for name in LOCKS]
    project.declare("one>9")
    failed = project.run("write")
    assert failed.returncode == 1
    assert "The lock files are as before." in failed.stderr
    assert [(project.folder / name).read_text() for name in LOCKS] == before


def test_lock_files_that_lack_a_declared_package_are_noticed(project: Project) -> None:
    assert project.run("check").returncode == 0
    project.declare("one", "two")
    behind = project.run("check")
    assert behind.returncode == 1
    assert "`make lock` adds what is missing" in behind.stderr
    project.succeed("write")
    assert project.run("check").returncode == 0


def test_only_dependencies_count(project: Project) -> None:
    project.declare("one", comment='description = "another"')
    assert project.run("check").returncode == 0


def test_the_setup_does_not_succeed_without_a_declared_package(project: Project) -> None:
    program("make")
    project.declare("one", "two")
    done = subprocess.run(
        ["make", "setup"], cwd=project.folder, env=project.env, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "`make lock` adds what is missing" in done.stderr
    assert not (project.folder / ".venv" / ".installed").exists()


def test_the_lock_files_of_this_checkout_have_what_it_declares() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "locks"), "check"]
    subprocess.run(command, check=True)
