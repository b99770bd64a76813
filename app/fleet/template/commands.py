"""Commands for a repository that was made from the template: take a later release, and give the service its name.

They need no settings and no database, so they use nothing of `app/fleet/cli`, which lists them.
"""

from pathlib import Path
from typing import Annotated

import typer

from app.fleet.errors import TemplateError
from app.fleet.telemetry.redaction import printable
from app.fleet.template import branch, names, notes, releases
from app.fleet.template.git import Git
from app.fleet.template.merge import Merge, merge
from app.fleet.template.record import Record
from app.fleet.template.releases import Release

# For each class of files in a `Merge`, in this order: the text that is printed, and whether its files always are.
CLASSES = {
    "replaced": ("replaced, in the fenced directories", False),
    "added": ("added by the release", False),
    "removed": ("removed by the release", False),
    "taken": ("taken from the release, not changed here", False),
    "merged": ("merged, changed by both", True),
    "kept": ("kept as they are here, changed by both", True),
    "left out": ("left out, deleted here", True),
    "conflict": ("in conflict", True),
}


def update(
    to: Annotated[
        str | None, typer.Option(help="Tag, branch or commit of the template. Unset: its newest release.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="URL or path of the template's repository. It is remembered.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would happen to which files, and the release notes.")
    ] = False,
) -> None:
    """Merge a later release of the template into this repository, on a new branch."""
    git = Git(Path.cwd())
    known = Record.read(git.folder)
    if Path(git("rev-parse", "--show-toplevel")).resolve() != git.folder.resolve():
        raise TemplateError("this is not the top folder of a git repository: run the command there")
    branch.check_repository(git)
    if not dry_run:
        branch.check_is_clean(git)
    template = releases.fetch(git, source or known.source)
    target = template.target(to)
    base = template.base(known, target)
    if git.succeeds("merge-base", "--is-ancestor", target.commit, base.commit):
        write(f"nothing to do: this repository has {base.label} ({base.commit[:9]}), which contains {target.label}")
        return
    name = branch.name_for(target)
    if not dry_run:
        branch.check_is_free(git, name)
    merged = merge(git, template, base, target)
    show(merged, base, target, every_file=dry_run)
    if dry_run:
        write("\nNothing was changed. Without --dry-run, the result is on the branch " + name + ".")
        return
    branch.create(git, merged, name)
    show_next_steps(merged, name)
    if merged.conflicts:
        raise typer.Exit(1)


def show(merged: Merge, base: Release, target: Release, *, every_file: bool) -> None:
    """Print the release notes, and what happens to which files."""
    changed = notes.between(*merged.changelogs)
    for heading, text in changed.items():
        write(f"## {heading}\n\n{text}\n")
    write(f"from {base.label} ({base.commit[:9]}) to {target.label} ({target.commit[:9]}):")
    for kind, (text, listed) in CLASSES.items():
        if paths := merged.classes[kind]:
            write(f"  {len(paths):4} {text}")
            for path in paths if listed or every_file else []:
                write(f"         {path}")
    for steps in notes.manual_steps(changed):
        write(f"\nTo do by hand:\n\n{steps}")


def show_next_steps(merged: Merge, name: str) -> None:
    if merged.conflicts:
        write(f"\nOn the branch {name}, some files are in conflict. Resolve the marked places, then:")
        write("  git add --all && git commit     the update becomes a commit")
    else:
        write(f"\nThe update is a commit on the branch {name}, which is checked out. Next:")
    if merged.locks_are_kept:
        write("  make lock                       the lock files are yours: add what the release needs")
    write("  make check test                 install the new packages, and try the result")
    write(f"  git switch - && git merge {name}")
    write("To undo all of it:")
    write(f"  git switch --discard-changes - && git branch -D {name}")


def rename(
    name: Annotated[str, typer.Argument(help="Name of the service: a DNS label, such as `harbour-desk`.")],
    title: Annotated[
        str | None, typer.Option(help="Title for people. Unset: the name with spaces and an initial capital.")
    ] = None,
) -> None:
    """Rename the service: its title, image, Compose project, Kubernetes manifests and Python project."""
    changed = names.rename(Path.cwd(), name, title)
    if not changed:
        write("nothing to do: this is its name already")
    for path in changed:
        write(f"renamed in {path}")


def write(text: str) -> None:
    """Print text. Control characters are escaped: file names and release notes come from another repository."""
    typer.echo("\n".join(map(printable, text.split("\n"))))
