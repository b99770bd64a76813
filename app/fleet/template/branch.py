"""The branch with the result of an update: a commit, or the files in which conflicts are to be resolved.

The branch begins at the checked-out commit. Without conflicts it is created last, together with the switch to it, when
its commit exists. With conflicts, it is created at the checked-out commit, and then the merged files are written.

    failure                                  effect
    killed before the branch exists          nothing has changed; the next call repeats the merge
    killed before files were written         the branch is empty; the next call begins again on the same branch
    an untracked file is in the way          git refuses and names the file; likewise
"""

from app.fleet.errors import TemplateError
from app.fleet.template import trees
from app.fleet.template.git import Git
from app.fleet.template.merge import Merge
from app.fleet.template.releases import Release


def check_repository(git: Git) -> None:
    """Refuse a repository in which the update could not be committed, or not be merged afterwards."""
    if not git("branch", "--show-current"):
        raise TemplateError(
            "a commit is checked out, and no branch: make one (git switch -c main), and repeat the command"
        )
    # Without a name and an address, git could not make the commit. It prints what to do.
    git("var", "GIT_COMMITTER_IDENT")


def check_is_clean(git: Git) -> None:
    if git("status", "--porcelain", "--untracked-files=no"):
        raise TemplateError("there are changes that are not committed: commit or stash them, and repeat the command")


def name_for(target: Release) -> str:
    return f"flotilla-update-{target.label.removeprefix('v').replace('/', '-')}"


def check_is_free(git: Git, name: str) -> None:
    """Refuse to overwrite a branch that has commits of its own."""
    if git.succeeds("rev-parse", "--verify", "--quiet", f"refs/heads/{name}") and not git.succeeds(
        "merge-base", "--is-ancestor", f"refs/heads/{name}", "HEAD"
    ):
        raise TemplateError(
            f"the branch {name} exists already: merge it, or delete it (git branch -D {name}), and repeat the command"
        )


def create(git: Git, merge: Merge, name: str) -> None:
    """Switch to a branch with the merged files: in a commit or, if there are conflicts, in the work tree."""
    message = f"chore: update the template to {merge.record.release} ({merge.record.commit[:9]})"
    tree = trees.write(git, merge.files)
    if not merge.conflicts:
        git("switch", "--quiet", "--force-create", name, git("commit-tree", tree, "-p", "HEAD", "-m", message))
        return
    git("switch", "--quiet", "--force-create", name)
    git("read-tree", "-m", "-u", "HEAD", tree)
    # The stages mark the files in conflict.
    removed = "".join(f"0 {'0' * len(tree)}\t{path}\0" for path in {each.path for each in merge.conflicts})
    stages = "".join(f"{each.mode} {each.oid} {each.stage}\t{each.path}\0" for each in merge.conflicts)
    git("update-index", "-z", "--index-info", given=(removed + stages).encode(errors="surrogateescape"))
