"""The walkthrough works as it is written: each command is run, in one shell, in a clone of this repository.

The `sh` blocks of the page are typed, and `python` blocks are written to the file that their first line names. `text`
blocks must appear in the output of the commands above them: these lines in this order, with any text between them or
instead of `…`, with any spaces, and with other numbers where they differ each time (`LOOSE`). If a later command
repeats a process id of the page, the id of the real process is used.

Everything happens under a temporary directory, on an embedded PostgreSQL of its own; the installed packages are those
of this environment.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.fleet.db import embedded
from tests.support.fleet import ROOT, environment
from tests.support.postgres import eventually, free_port
from tests.support.tools import program

PAGE = ROOT / "docs" / "start" / "first-action.md"
NEEDED = ("bash", "curl", "git", "make")
MAX_STEPS = 10
# A process id, a time, a share, a duration, the number of an instance.
LOOSE = re.compile(r"\d{4,}|\d\d:\d\d:\d\d|\d+(?=%)|\d+\.\d+|(?<=flotilla-)\d+")
DONE = "-- the shell is done with that --"


@dataclass(frozen=True)
class Block:
    kind: str
    text: str


def blocks() -> list[Block]:
    found = re.findall(r"^```(\S*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(kind, text) for kind, text in found]


class Reader:
    """Follows the page as a reader does: types commands, writes files, and checks the output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clone = folder / "harbour"
        first = free_port(3)
        # The real numbers, by the numbers on the page.
        self.numbers = {str(8000 + each): str(first + each) for each in range(3)}
        self.shown = ""
        # Without this path, the console scripts would import the modules of the checkout.
        env = {"FLOTILLA_PORT": str(first), "PYTHONPATH": str(self.clone), "PYTHONUNBUFFERED": "1"}
        # The output is formatted for people.
        env |= {"FLOTILLA_LOG_FORMAT": "auto", "PYTHONWARNINGS": ""}
        self.shell = subprocess.Popen(
            ["bash", "-euo", "pipefail"],
            cwd=folder,
            env=environment(None, env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self._ears = threading.Thread(target=self._listen, daemon=True)
        self._ears.start()

    def type(self, commands: str) -> None:
        """Run these commands, and wait until they have ended; `shown` has their output."""
        self.shown = ""
        assert self.shell.stdin is not None
        self.shell.stdin.write(f"{self.here(commands)}\necho '{DONE}'\n")
        self.shell.stdin.flush()
        eventually(lambda: DONE in self.shown or not self._ears.is_alive(), within=120)
        assert DONE in self.shown, f"the last of these failed:\n{self.here(commands)}\nand it showed:\n{self.shown}"

    def expect(self, text: str) -> None:
        """Wait until the lines of `text` have been shown in their order, and remember the real numbers in them."""
        pattern = re.compile(".*?".join(map(loose_pattern, text.splitlines())), re.DOTALL)
        try:
            found = eventually(lambda: pattern.search(self.shown), within=60)
        except AssertionError:
            pytest.fail(f"the page promises:\n{text}\nbut this was shown:\n{self.shown}")
        for here, there in zip(found.groups(), LOOSE.findall(text), strict=True):
            if len(there) >= 4 and there.isdecimal():
                self.numbers.setdefault(there, here)

    def write(self, text: str) -> None:
        """Write the file that the first line names, or append to it."""
        where, _, content = text.partition("\n")
        named = re.fullmatch(r"# ((?:app|tests/mine)/\S+\.py)(, at the end)?", where)
        assert named, f"a python block begins with the name of its file, and not with {where!r}"
        path = self.clone / named[1]
        path.write_text(f"{path.read_text()}\n\n{content}" if named[2] else content)

    def here(self, text: str) -> str:
        return re.sub(r"\d{4,}", lambda number: self.numbers.get(number[0], number[0]), text)

    def leave(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.shell.pid, signal.SIGKILL)
        self.shell.communicate()
        embedded.stop(self.clone / ".flotilla" / "postgresql")
        for process in started_in(self.clone):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _listen(self) -> None:
        assert self.shell.stdout is not None
        for line in self.shell.stdout:
            self.shown += line


def loose_pattern(line: str) -> str:
    """Return a pattern for a line, with a group for each number that may differ."""
    words = (r"([\d:.]+)".join(map(re.escape, LOOSE.split(word))) for word in line.split())
    return r"\s+".join(words).replace("…", ".*?")


def started_in(folder: Path) -> Iterator[int]:
    """Yield the processes whose working directory is in this folder, which only this test uses."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").resolve().is_relative_to(folder):
                yield int(process.name)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Create a repository to clone, with the files of this checkout, committed or not."""
    origin = tmp_path / "origin"
    ignored = (ROOT / ".gitignore").read_text().split()
    shutil.copytree(ROOT, origin, ignore=shutil.ignore_patterns(".git", *(each.strip("/") for each in ignored)))
    author = ("-c", "user.name=walkthrough", "-c", "user.email=walkthrough@fleet.example", "-c", "commit.gpgsign=no")
    for command in (("init", "--quiet"), ("add", "."), (*author, "commit", "--quiet", "--message", "now")):
        subprocess.run(["git", *command], cwd=origin, check=True)
    return origin


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    for name in NEEDED:
        program(name)
    own = Reader(tmp_path)
    try:
        yield own
    finally:
        own.leave()


def lend_environment(clone: Path) -> None:
    """Link the installed packages into the clone, so that `make setup` has nothing to do."""
    (clone / ".venv").mkdir()
    for each in Path(sys.prefix).iterdir():
        if each.name != ".installed":
            (clone / ".venv" / each.name).symlink_to(each)
    (clone / ".venv" / ".installed").touch()


@pytest.mark.long
def test_every_command_of_the_walkthrough_shows_what_the_page_shows(repository: Path, reader: Reader) -> None:
    """The test takes long because the page starts three instances twice."""
    for block in blocks():
        match block.kind:
            case "sh" if not reader.clone.exists():
                first, *rest = block.text.replace("<repository>", str(repository)).splitlines()
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
        subprocess.run(
            [sys.executable, "-m", "ruff", *check, "--quiet", "app", "alembic", "tests/mine"],
            cwd=reader.clone,
            check=True,
        )


def test_the_walkthrough_has_few_steps() -> None:
    steps = re.findall(r"^## (\d+)\. ", PAGE.read_text(), re.MULTILINE)
    assert steps == [str(number) for number in range(1, len(steps) + 1)]
    assert len(steps) <= MAX_STEPS
