"""A release of the template, merged with the changes that a clone has made since its base.

    app/fleet, alembic/versions/fleet   the release's files, whole. A clone that has edited them is refused
    alembic/versions/app                the clone's files: they are the history of its database
    files that the clone has deleted    stay deleted. So does a file that the release adds to a deleted folder or moves
    the Python lock files               the release's, or the clone's if the clone has changed them
    README.md, CHANGELOG.md             merged if that is possible without a conflict, otherwise the clone's
    all other files                     merged three ways by git; what both have changed may conflict

The merge happens in git's database of objects. It changes no branch, no index and no file in the work tree.

The base and the release are renamed as the clone is (`names.py`), so that the new name is no difference between them.
"""

from dataclasses import dataclass, replace
from typing import Self

from app.fleet.errors import FencedFilesEdited, TemplateError
from app.fleet.template import names, record, trees
from app.fleet.template.git import Git
from app.fleet.template.record import Record
from app.fleet.template.releases import Release, Template
from app.fleet.template.trees import File, Files, below

FENCED = ("app/fleet", "alembic/versions/fleet")
OWN = ("alembic/versions/app",)
LOCKS = ("requirements.lock", "requirements-dev.lock", "requirements-bench.lock")
PAGES = ("README.md", "CHANGELOG.md")


@dataclass(frozen=True)
class Conflict:
    """A line of git's index for a file that cannot be merged: stage 1 is the base, 2 the clone, 3 the release."""

    mode: str
    oid: str
    stage: str
    path: str

    @classmethod
    def parse(cls, line: str) -> Self:
        state, path = line.split("\t", 1)
        mode, oid, stage = state.split(" ")
        return cls(mode, oid, stage, path)


@dataclass(frozen=True)
class Merge:
    """The result of a merge: its files, its conflicts, and what it did with which files."""

    record: Record
    files: Files
    conflicts: list[Conflict]
    # Files by what happens to them.
    classes: dict[str, list[str]]
    # The text of CHANGELOG.md at the base and in the release.
    changelogs: tuple[str, str]

    @property
    def locks_are_kept(self) -> bool:
        return any(path in LOCKS for path in self.classes["kept"])


def merge(git: Git, template: Template, base: Release, target: Release) -> Merge:
    """Merge the release into the checked-out commit."""
    ours = trees.read(git, "HEAD")
    known = record_in(git, ours)
    old, new = (renamed(git, trees.read(git, each.commit), known) for each in (base, target))
    updated = replace(known, release=record_in(git, new).release, commit=target.commit, source=template.source)
    changelogs = changelog(git, old), changelog(git, new)
    # It is written at the end.
    old[record.FILE] = new[record.FILE] = ours[record.FILE]
    check_fence(git, old, ours, new)
    kept = keep_own(old, ours, new)
    left_out = leave_deleted(git, old, ours, new)
    merged, conflicts = merge_files(git, old, ours, new, target.label)
    if pages := {each.path for each in conflicts} & set(PAGES):
        for page in pages:
            leave(page, old, new)
        kept += pages
        merged, conflicts = merge_files(git, old, ours, new, target.label)
    classes = classify(ours, new, merged, {each.path for each in conflicts})
    merged[record.FILE] = replace(ours[record.FILE], oid=git.store(updated.text().encode()))
    return Merge(updated, merged, conflicts, {**classes, "kept": sorted(kept), "left out": left_out}, changelogs)


def classify(ours: Files, new: Files, merged: Files, clashing: set[str]) -> dict[str, list[str]]:
    """Return the files that change, by what happens to them."""
    classes: dict[str, list[str]] = {"replaced": [], "added": [], "removed": [], "taken": [], "merged": []}
    for path in sorted({*ours, *merged} - clashing):
        if merged.get(path) == ours.get(path):
            continue
        if below(path, FENCED):
            kind = "replaced"
        elif path not in ours:
            kind = "added"
        elif path not in merged:
            kind = "removed"
        else:
            kind = "taken" if merged[path] == new.get(path) else "merged"
        classes[kind].append(path)
    return {**classes, "conflict": sorted(clashing)}


def keep_own(old: Files, ours: Files, new: Files) -> list[str]:
    """Keep the files that an update leaves as they are. Return those that the release would have changed."""
    kept = []
    for path in {*old, *new}:
        is_own = below(path, OWN) or (path in LOCKS and ours.get(path) != old.get(path))
        if is_own and old.get(path) != new.get(path):
            leave(path, old, new)
            kept.append(path)
    return kept


def check_fence(git: Git, old: Files, ours: Files, new: Files) -> None:
    """Refuse a clone that has edited the fenced directories, unless it has what the release has."""
    fenced = [path for path in {*old, *ours} if below(path, FENCED)]
    edited = sorted(path for path in fenced if ours.get(path) not in {old.get(path), new.get(path)})
    if edited:
        pair = [trees.write(git, {path: files[path] for path in edited if path in files}) for files in (old, ours)]
        raise FencedFilesEdited(
            f"{git('diff', *pair)}\n\n"
            f"The update replaces {' and '.join(FENCED)} whole, and this repository has changed files there (the diff "
            f"is above): {', '.join(edited)}. Undo these changes in a commit, update, and then apply the diff again if "
            f"it is still needed. Better: propose the change to the template, or make it outside of these directories."
        )


def leave(path: str, old: Files, new: Files) -> None:
    """Make the file of the release equal to the file of the base: the merge then keeps the clone's file."""
    if path in old:
        new[path] = old[path]
    else:
        new.pop(path, None)


def leave_deleted(git: Git, old: Files, ours: Files, new: Files) -> list[str]:
    """Remove from both sides what the clone has deleted. Return the files that the release would bring back."""
    moved_by_clone = trees.renames(git, trees.write(git, old), trees.write(git, ours))
    moved_by_release = trees.renames(git, trees.write(git, old), trees.write(git, new))
    deleted = {path for path in old if path not in ours and path not in moved_by_clone and not below(path, FENCED)}
    gone = folders(deleted) - folders(ours)
    left_out = []
    for path in sorted(deleted):
        for each in (path, moved_by_release.get(path, path)):
            if new.get(each) not in {None, old[path]}:
                left_out.append(each)
            if each not in ours:
                new.pop(each, None)
        del old[path]
    for path in [path for path in new if path not in old and path not in ours and folders([path]) & gone]:
        del new[path]
        left_out.append(path)
    return sorted(set(left_out))


def folders(paths: "set[str] | Files | list[str]") -> set[str]:
    """Return all folders that contain these files, at whatever depth."""
    return {path[:end] for path in paths for end, letter in enumerate(path) if letter == "/"}


def merge_files(git: Git, old: Files, ours: Files, new: Files, label: str) -> tuple[Files, list[Conflict]]:
    """Merge by git. Return the merged files, in which conflicts are marked, and the conflicts."""
    ancestor = trees.commit(git, old)
    sides = trees.commit(git, ours, ancestor), trees.commit(git, new, ancestor)
    _, output = git.merge_tree("--write-tree", "-z", "--no-messages", *sides)
    tree, *lines = output.split("\0")
    conflicts = [Conflict.parse(line) for line in lines if line]
    files = trees.read(git, tree)
    for path in {conflict.path for conflict in conflicts} & set(files):
        # Git names the sides by the commits that it was given.
        marked = git.blob(files[path].oid)
        for side, name in zip(sides, ("this repository", f"template {label}"), strict=True):
            marked = marked.replace(side.encode(), name.encode())
        files[path] = replace(files[path], oid=git.store(marked))
    return files, conflicts


def renamed(git: Git, files: Files, known: Record) -> Files:
    """Return the files of the template with the name of the clone."""
    template = record_in(git, files)
    found = dict(files)
    if (template.name, template.title) != (known.name, known.title):
        for path in filter(names.places, files):
            before = git.blob(files[path].oid)
            after = names.renamed(path, before.decode(), template, known).encode()
            if after != before:
                found[path] = File(files[path].mode, git.store(after))
    return found


def record_in(git: Git, files: Files) -> Record:
    if record.FILE not in files:
        raise TemplateError(f"a commit has no {record.FILE}: it is older than the first release of the template")
    return Record.parse(git.blob(files[record.FILE].oid).decode())


def changelog(git: Git, files: Files) -> str:
    return git.blob(files["CHANGELOG.md"].oid).decode() if "CHANGELOG.md" in files else ""
