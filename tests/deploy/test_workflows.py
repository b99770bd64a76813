"""The workflows of GitHub are safe as far as that can be checked here, and the release script fits the changelog."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.declared import ROOT
from tests.support.tools import program

pytestmark = pytest.mark.template

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NOTES = ROOT / "scripts" / "release-notes"


def installed(name: str) -> str:
    """Return the path of a program that is a package of the group `dev`."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found, f"{name} is not installed: make setup"
    return found


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        yield from job.get("steps", [])


def test_zizmor_finds_nothing() -> None:
    """For example: no expression is put into a script, no credentials stay in a checkout, permissions are narrow."""
    done = subprocess.run(
        [installed("zizmor"), "--offline", "--no-progress", ROOT / ".github"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_by_its_commit_and_says_its_version(workflow: Path) -> None:
    used = re.findall(r"^\s*(?:- )?uses: (.+)$", workflow.read_text(), re.MULTILINE)
    assert used
    for each in used:
        assert re.fullmatch(r"[\w/.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./\.github/workflows/\w+\.yml.*", each), each


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_the_shell_of_each_step_can_be_parsed(workflow: Path) -> None:
    shell = program("bash")
    for step in steps(workflow):
        if "run" in step:
            assert "${{" not in step["run"], "an expression belongs into `env`"
            subprocess.run([shell, "-n", "-c", step["run"]], check=True)


def test_an_image_is_published_only_after_the_tests_and_notes_only_after_the_image() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    assert jobs["image"]["needs"] == "test"
    assert jobs["notes"]["needs"] == "image"


def test_every_script_that_a_workflow_calls_exists() -> None:
    for workflow in WORKFLOWS:
        for step in steps(workflow):
            for script in re.findall(r"(?<!\S)((?:scripts|\.ci)/[\w-]+)", step.get("run", "")):
                assert os.access(ROOT / script, os.X_OK), script


def test_newer_versions_wait_for_a_week() -> None:
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert updates
    for each in updates:
        assert each["cooldown"]["default-days"] >= 7
        assert (ROOT / each["directory"].strip("/")).is_dir()


# -- hooks ------------------------------------------------------------------------------------------------------------


def checks() -> list[str]:
    (found,) = re.findall(r"^CHECKS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return str(found).split()


def test_the_hooks_are_the_checks_of_the_makefile() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    assert [hook["entry"] for hook in local["hooks"]] == [
        f"make --no-print-directory check-{each}" for each in checks()
    ]


def test_a_commit_that_a_check_refuses_is_not_made(tmp_path: Path) -> None:
    """The hooks are installed as `make hooks` does it, for a Makefile whose second check fails."""
    program("git")
    program("make")
    git = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "PREK_HOME": str(tmp_path / "prek")}
    git |= {f"GIT_{role}_{key}": "tester" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    folder = tmp_path / "clone"
    folder.mkdir()
    shutil.copy(ROOT / ".pre-commit-config.yaml", folder)
    passes = "".join(f"check-{each}:\n\t@echo {each} is checked\n" for each in checks() if each != "lint")
    (folder / "Makefile").write_text(f"{passes}check-lint:\n\ttest ! -e wrong\n")

    def run(*command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, cwd=folder, env=git, capture_output=True, text=True, check=False)

    run("git", "init", "--quiet")
    assert run(installed("prek"), "install").returncode == 0
    run("git", "add", "--all")
    assert run("git", "commit", "--message", "right").returncode == 0
    (folder / "wrong").touch()
    run("git", "add", "--all")
    refused = run("git", "commit", "--message", "wrong")
    assert refused.returncode != 0
    assert "make check-lint" in refused.stdout + refused.stderr
    assert run("git", "log", "--format=%s").stdout == "right\n"


# -- release notes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A checkout whose code and changelog have the version 1.2.3."""
    (tmp_path / "app").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(NOTES, tmp_path / "scripts")
    (tmp_path / "app" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n- Later.\n\n## [1.2.3] - 2026-11-20\n\n- Now.\n\n## 1.2.2\n\n- Before.\n"
    )
    return tmp_path


def notes(folder: Path, version: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(folder / "scripts" / "release-notes"), version]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", ["1.2.3", "v1.2.3"])
def test_the_notes_of_a_release_are_its_section_of_the_changelog(released: Path, version: str) -> None:
    assert notes(released, version).stdout == "- Now.\n"


def test_a_tag_that_is_not_the_version_of_the_code_is_refused(released: Path) -> None:
    refused = notes(released, "v1.2.2")
    assert refused.returncode == 1
    assert "__version__ in app/__init__.py is '1.2.3'" in refused.stderr


@pytest.mark.parametrize(
    "text", ["# Changelog\n\n## Unreleased\n\n- Now.\n", "# Changelog\n\n## 1.2.3\n\n## 1.2.2\n\n- X\n"]
)
def test_a_release_without_notes_is_refused(released: Path, text: str) -> None:
    (released / "CHANGELOG.md").write_text(text)
    refused = notes(released, "1.2.3")
    assert refused.returncode == 1
    assert "no section" in refused.stderr
