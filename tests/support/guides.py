"""The programs in the guides and in the walkthrough, which tests run as a reader would."""

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GUIDES = DOCS / "guides"
WALKTHROUGH = DOCS / "start" / "first-action.md"
# What a reader replaces in them.
SERVICE, KEY = "http://127.0.0.1:8000", '"KEY"'


def program(guide: str, language: str, text: str) -> str:
    """Return the program of a guide in this language that contains this text."""
    blocks: list[str] = re.findall(
        rf"^```{language}\n(.*?)^```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (found,) = (block for block in blocks if text in block)
    return found


def walkthrough() -> list[tuple[str, str]]:
    """Return the kind and the text of each block of the walkthrough."""
    return re.findall(r"^```(\S*)\n(.*?)^```$", WALKTHROUGH.read_text(), re.MULTILINE | re.DOTALL)


def write_file(block: str, clone: Path) -> None:
    """Write the file that the first line of a `python` block of the walkthrough names, or append to it."""
    where, _, content = block.partition("\n")
    named = re.fullmatch(r"# (app/\S+\.py)(, at the end)?", where)
    assert named, f"a python block begins with the name of its file, and not with {where!r}"
    path = clone / named[1]
    path.write_text(f"{path.read_text()}\n\n{content}" if named[2] else content)


def copy_checkout(target: Path) -> None:
    """Copy the files of this checkout, committed or not, without what git ignores."""
    ignored = (each.strip("/") for each in (ROOT / ".gitignore").read_text().split())
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".git", *ignored), symlinks=True)


def commit_all(folder: Path, message: str, *, new: bool = False) -> None:
    """Commit all files in a folder, as somebody without a configuration of git."""
    if new:
        subprocess.run(["git", "init", "--quiet", "--initial-branch=main"], cwd=folder, check=True)
    author = ("-c", "user.name=walkthrough", "-c", "user.email=walkthrough@fleet.example", "-c", "commit.gpgsign=no")
    for command in (("add", "--all"), (*author, "commit", "--quiet", "--message", message)):
        subprocess.run(["git", *command], cwd=folder, check=True)


def follow_js() -> str:
    """Return the reader of streams, for browsers and Node.js."""
    return program("follow-runs", "js", "async function* follow(")


def for_service(text: str, url: str, key: str) -> str:
    """Return a program for this service instead of the example's."""
    assert SERVICE in text
    assert KEY in text
    return text.replace(SERVICE, url).replace(KEY, f'"{key}"')
