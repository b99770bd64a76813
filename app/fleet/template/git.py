"""Run git in one work tree. A command that fails raises `TemplateError` with what git has written."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from app.fleet.errors import TemplateError

# Git does not ask for a password, for which a script would wait forever; it fails instead.
ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


class Git:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str, given: bytes | None = None, env: Mapping[str, str] | None = None) -> str:
        """Return what the command prints, without the last line break."""
        done = self._run(arguments, given, env)
        if done.returncode:
            raise failure(arguments, done)
        return text(done.stdout).removesuffix("\n")

    def merge_tree(self, *arguments: str) -> tuple[bool, str]:
        """Merge two commits without a work tree. Return whether there are no conflicts, and what git prints."""
        done = self._run(("merge-tree", *arguments), None, None)
        if done.returncode not in {0, 1}:
            raise failure(("merge-tree",), done)
        return done.returncode == 0, text(done.stdout)

    def succeeds(self, *arguments: str) -> bool:
        """Whether the command ends with 0, for commands that answer a question."""
        return self._run(arguments, None, None).returncode == 0

    def blob(self, oid: str) -> bytes:
        done = self._run(("cat-file", "blob", oid), None, None)
        if done.returncode:
            raise failure(("cat-file",), done)
        return done.stdout

    def store(self, content: bytes) -> str:
        """Store a file in git's database, and return its id."""
        return self("hash-object", "-w", "--stdin", given=content)

    def _run(
        self, arguments: tuple[str, ...], given: bytes | None, env: Mapping[str, str] | None
    ) -> "subprocess.CompletedProcess[bytes]":
        try:
            return subprocess.run(
                ["git", *arguments],
                cwd=self.folder,
                input=given,
                stdin=subprocess.DEVNULL if given is None else None,
                env={**os.environ, **ENVIRONMENT, **(env or {})},
                capture_output=True,
                check=False,
            )
        except FileNotFoundError:
            raise TemplateError("git is not installed: install it and repeat the command") from None


def failure(arguments: tuple[str, ...], done: "subprocess.CompletedProcess[bytes]") -> TemplateError:
    return TemplateError(f"`git {arguments[0]}` failed: {text(done.stderr or done.stdout).strip()}")


def text(output: bytes) -> str:
    # File names are bytes.
    return output.decode(errors="surrogateescape")
