"""Copies of this checkout that become services: with the code of the walkthrough, and without the example."""

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WALKTHROUGH = ROOT / "docs" / "start" / "first-action.md"


def copy_checkout(target: Path) -> None:
    """Copy the files of this checkout, committed or not, without what git ignores."""
    ignored = (each.strip("/") for each in (ROOT / ".gitignore").read_text().split())
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".git", *ignored), symlinks=True)


def commit_all(folder: Path, message: str, *, new: bool = False) -> None:
    """Commit all files in a folder, without a configuration of git."""
    if new:
        subprocess.run(["git", "init", "--quiet", "--initial-branch=main"], cwd=folder, check=True)
    author = ("-c", "user.name=tester", "-c", "user.email=tester@fleet.example", "-c", "commit.gpgsign=no")
    for command in (("add", "--all"), (*author, "commit", "--quiet", "--message", message)):
        subprocess.run(["git", *command], cwd=folder, check=True)


def delete_example(clone: Path) -> None:
    """Delete the files that the walkthrough names, the migration, and the table."""
    (paragraph,) = re.findall(
        r"^When you no longer need the example, (.*?)\n\n", WALKTHROUGH.read_text(), re.DOTALL | re.MULTILINE
    )
    for path in re.findall(r"`([\w/]+/(?:test_)?\w+\.py)`", paragraph):
        if path not in {"app/routes/__init__.py", "app/models.py"}:
            (clone / path).unlink()
    (clone / "alembic/versions/app/app_0002_mailings.py").unlink()
    models = clone / "app/models.py"
    models.write_text(models.read_text().partition("\n\nclass Mailing")[0] + "\n")


def write_walkthrough(clone: Path) -> None:
    """Write the files of the walkthrough, in a clone without the example."""
    for block in re.findall(r"^```python\n(.*?)^```$", WALKTHROUGH.read_text(), re.DOTALL | re.MULTILINE):
        where, _, content = block.partition("\n")
        named = re.fullmatch(r"# (\S+\.py)(, at the end)?", where)
        assert named, f"a python block begins with the name of its file, and not with {where!r}"
        content = content.replace("import mailings, ", "import ").replace(
            "router.include_router(mailings.router)\n", ""
        )
        path = clone / named[1]
        path.write_text(f"{path.read_text().rstrip()}\n\n\n{content}" if named[2] else content)
