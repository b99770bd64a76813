"""A clone with its own files passes the checks of the template, whatever the conventions of these files are."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fleet import ROOT

pytestmark = pytest.mark.template

ACTION = """import logging

from app.fleet import Run, action

log = logging.getLogger(__name__)


@action("weigh-anchor")
async def weigh_anchor(run: Run) -> None:
    log.warning("the anchor of %s, as PAGE has it", run.id)
"""
ERROR = """from app.fleet.errors import FleetError


class AnchorStuck(FleetError):
    exit_code = 7
"""


# Selects the tests that check code, and not only pages.
CODE_CHECKS = "log or error or exists or machine or environment or anomaly or docstring"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of this checkout, with an action, a package of routes, an error and a setting added."""
    made = tmp_path / "clone"
    ignored = (ROOT / ".gitignore").read_text().split()
    shutil.copytree(ROOT, made, ignore=shutil.ignore_patterns(".git", *(each.strip("/") for each in ignored)))
    shutil.copy(ROOT / ".gitignore", made)
    (made / "app" / "actions" / "anchor.py").write_text(ACTION.replace("PAGE", "docs" + "/anchors.md"))
    (made / "app" / "routes" / "anchors").mkdir()
    (made / "app" / "routes" / "anchors" / "__init__.py").touch()
    (made / "app" / "anchors.py").write_text(ERROR)
    with (made / ".env.example").open("a") as settings:
        settings.write("\nANCHOR=bower\n# Where the chart is.\n# CHART_URL=\n")
    return made


def run_in(clone: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=clone, env={"PATH": "", "PYTHONPATH": str(clone)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_checks_of_the_template_do_not_apply_to_the_own_files_of_a_clone(clone: Path) -> None:
    run_in(clone, "ruff", "check", "--no-cache", "--quiet", "app")
    run_in(clone, "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/unit/test_documentation.py", "-k", CODE_CHECKS)
