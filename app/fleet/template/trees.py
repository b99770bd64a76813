"""Git trees as dictionaries of files, so that a file can be replaced or left out before trees are merged.

A commit without history is made of each tree: a merge needs no more than the base and the two sides. So it works for
clones that have not kept the history of the template.
"""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.fleet.template.git import Git

Files = dict[str, "File"]
# Commits that only the merge reads. Their author is in no history.
AUTHOR = {
    f"GIT_{role}_{key}": value
    for role in ("AUTHOR", "COMMITTER")
    for key, value in (("NAME", "flotilla"), ("EMAIL", "flotilla"), ("DATE", "2000-01-01T00:00:00Z"))
}


@dataclass(frozen=True)
class File:
    mode: str
    oid: str


def read(git: Git, tree: str) -> Files:
    """Return the files of a commit or tree by their paths."""
    found = {}
    for line in filter(None, git("ls-tree", "-r", "-z", "--full-tree", tree).split("\0")):
        mode, _, rest = line.split(" ", 2)
        oid, path = rest.split("\t", 1)
        found[path] = File(mode, oid)
    return found


def write(git: Git, files: Mapping[str, File]) -> str:
    """Return the tree with these files."""
    lines = "".join(f"{file.mode} {file.oid}\t{path}\0" for path, file in files.items())
    with tempfile.TemporaryDirectory() as folder:
        env = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        git("update-index", "-z", "--index-info", given=lines.encode(errors="surrogateescape"), env=env)
        return git("write-tree", env=env)


def commit(git: Git, files: Mapping[str, File], *parents: str) -> str:
    """Return a commit that only a merge reads."""
    named = [argument for parent in parents for argument in ("-p", parent)]
    return git("commit-tree", write(git, files), *named, "-m", "flotilla update", env=AUTHOR)


def renames(git: Git, before: str, after: str) -> dict[str, str]:
    """Return the new paths of moved files by their old ones."""
    fields = git("diff", "--find-renames", "--diff-filter=R", "--name-status", "-z", before, after).split("\0")
    return dict(zip(fields[1::3], fields[2::3], strict=True))


def below(path: str, folders: Iterable[str]) -> bool:
    return path.startswith(tuple(f"{folder}/" for folder in folders))
