"""The walkthrough works as it is written: each command is run, in one shell, in a clone of this repository.

The `sh` blocks of the page are typed, `python` blocks are written to the file that their first line names, and `text`
blocks must appear in the output (`tests/support/page_reader.py`).
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fleet import ROOT
from tests.support.page_reader import lend_environment, reading, repository, started_in
from tests.support.pages import blocks

pytestmark = pytest.mark.template

PAGE = ROOT / "docs" / "start" / "first-action.md"
MAX_STEPS = 10


@pytest.mark.long
def test_every_command_of_the_walkthrough_shows_what_the_page_shows(tmp_path: Path) -> None:
    """The test takes long because the page starts three instances twice."""
    origin = repository(tmp_path)
    with reading(tmp_path) as reader:
        for block in blocks(PAGE):
            match block.language:
                case "sh" if not reader.clone.exists():
                    first, *rest = block.text.replace("<repository>", str(origin)).splitlines()
                    reader.type(first)
                    lend_environment(reader.clone)
                    reader.type("\n".join(rest))
                case "sh":
                    reader.type(block.text)
                case "text":
                    reader.expect(block.text)
                case "python":
                    reader.write(block.text)
                case other:
                    pytest.fail(f"a block of the walkthrough is sh, text or python, and not {other!r}")
        assert set(started_in(reader.clone)) <= {reader.shell.pid}, "the page leaves something running"
        for check in (["check"], ["format", "--check"]):
            command = [sys.executable, "-m", "ruff", *check, "--quiet", "app", "alembic", "tests/mine"]
            subprocess.run(command, cwd=reader.clone, check=True)


def test_the_walkthrough_has_few_steps() -> None:
    steps = re.findall(r"^## (\d+)\. ", PAGE.read_text(), re.MULTILINE)
    assert steps == [str(number) for number in range(1, len(steps) + 1)]
    assert len(steps) <= MAX_STEPS


def test_the_commands_of_the_readme_are_those_of_the_walkthrough_and_of_these_tests() -> None:
    (block,) = (each for each in blocks(ROOT / "README.md") if each.language == "sh")
    commands = [line.partition("#")[0].strip() for line in block.text.splitlines()]
    assert commands == ["make up", "make test"]
    assert blocks(PAGE)[0].text.endswith("\nmake up\n")
