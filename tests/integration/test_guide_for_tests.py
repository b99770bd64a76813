"""The guide `docs/guides/test.md` works as it is written: its files are put into a clone, whose tests then run."""

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.fleet import ROOT, environment

pytestmark = pytest.mark.template

GUIDE = ROOT / "docs" / "guides" / "test.md"
MODULE = "tests/mine/test_bills.py"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of this checkout with the files of the guide."""
    made = tmp_path / "clone"
    ignored = (ROOT / ".gitignore").read_text().split()
    shutil.copytree(ROOT, made, ignore=shutil.ignore_patterns(".git", *(each.strip("/") for each in ignored)))
    for block in re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL):
        where, _, content = block.partition("\n")
        named = re.fullmatch(r"# ((?:app|tests/mine)/\S+\.py)(, at the end)?", where)
        assert named, f"a python block begins with the name of its file, and not with {where!r}"
        path = made / named[1]
        assert path.exists() is (named[2] is not None), path
        path.write_text(f"{path.read_text()}\n\n{content}" if named[2] else content)
    return made


def run_in(clone: Path, *command: str) -> str:
    # As in a shell of the reader: without the settings of these tests, and without their temporary folder.
    env = environment(None, {"PYTHONPATH": str(clone)})
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=clone, env=env, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_the_tests_of_the_guide_pass(clone: Path) -> None:
    """It takes long because it prepares a server of its own."""
    shown = run_in(clone, "pytest", "-q", "-p", "no:cacheprovider", MODULE)
    written = len(re.findall(r"^async def test_", (clone / MODULE).read_text(), re.MULTILINE))
    assert f"{written} passed" in shown
    run_in(clone, "ruff", "check", "--no-cache", "--quiet", "app", "tests/mine")
    run_in(clone, "ruff", "format", "--no-cache", "--check", "--quiet", "app", "tests/mine")


def test_the_names_of_an_instance_and_of_its_points_are_those_of_the_guide() -> None:
    from app.fleet.testing import Instance, faults

    text = GUIDE.read_text()
    table = text.partition("| `instance.` | Does |")[2].partition("\n\n")[0]
    listed = re.findall(
        r"`(\w+)(?:\([^`]*\))?`", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line)
    )
    attributes = {"app", "client", "points"}
    methods = {name for name, value in vars(Instance).items() if callable(value) and not name.startswith("_")}
    assert Counter(listed) == Counter((methods - {"close"}) | attributes)
    points = set(re.findall(r"^\| `(\w+)` \|", text.partition("## Points")[2].partition("## ")[0], re.MULTILINE))
    assert faults.__doc__ is not None
    assert points == set(re.findall(r"^    (\w+)  +(?:before|after|at) ", faults.__doc__, re.MULTILINE))
