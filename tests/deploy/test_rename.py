"""After the `flotilla rename` of docs/guides/rename.md, the deployment still fits together, under its new name."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import clones
from tests.support.fleet import environment
from tests.support.guides import program

pytestmark = pytest.mark.template

# They render the manifests with each component, and check names, labels, selectors and secrets among them.
CHECKS = ("tests/deploy/test_kubernetes.py", "tests/deploy/test_compose.py", "tests/deploy/test_dockerfile.py")


@pytest.fixture
def renamed(tmp_path: Path) -> Path:
    """A copy of this checkout with another name."""
    made = tmp_path / "clone"
    clones.copy_checkout(made)
    rename, _ = program("rename", "sh", "flotilla rename").splitlines()
    run_in(made, "app", *shlex.split(rename)[1:])
    return made


def run_in(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder, env=environment(None, {"PYTHONPATH": str(folder), "PYTHONWARNINGS": ""}),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_the_deployment_of_a_renamed_service_passes_its_tests(renamed: Path) -> None:
    """The test takes long because it renders all manifests."""
    run_in(renamed, "pytest", "-q", "-x", "-p", "no:cacheprovider", *CHECKS)


def test_the_title_of_the_api_is_the_new_one(renamed: Path) -> None:
    assert '"title": "Harbour desk"' in run_in(renamed, "app", "openapi")


def test_a_renamed_service_leaves_out_the_tests_of_the_template_and_what_they_import(renamed: Path) -> None:
    shutil.rmtree(renamed / "examples")
    files = ("tests/unit/test_documentation.py", "tests/deploy/test_alerts.py")
    collected = run_in(renamed, "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *files)
    assert "::test_a_missing_leader" in collected
    assert "test_documentation.py::" not in collected
    assert "::test_every_alert_has_a_page_of_the_runbook" not in collected
