"""Which releases the template has, and which of its commits a clone was made from.

The commit that a clone was made from, its base, is the first of these that is known:

    the commit in .flotilla-template       written by an update, and by `git archive` into downloaded archives
    the newest common commit               the clone still has the template's history
    the commit with the same tree as the   the history was deleted, or began anew from a copy of the files
    clone's first commit
    the tag of the release in the file     otherwise

Only objects are fetched: no branch, tag or remote of the template appears in the clone.
"""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from app.fleet.errors import ReleaseUnknown, TemplateError
from app.fleet.template import record
from app.fleet.template.git import Git
from app.fleet.template.record import Record

VERSION = re.compile(r"refs/tags/v?(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True)
class Release:
    """A commit of the template, and how a person calls it."""

    commit: str
    label: str


@dataclass(frozen=True)
class Template:
    """The template's repository, and its tags and branches with their commits."""

    git: Git
    source: str
    refs: dict[str, str]

    def target(self, wanted: str | None) -> Release:
        """Return the release with this tag, branch or commit; without one, that with the highest version."""
        if wanted is None:
            versions = [ref for ref in self.refs if VERSION.fullmatch(ref)]
            if not versions:
                raise ReleaseUnknown(f"{self.source} has no release: name a branch or commit with --to")
            return self._at(max(versions, key=version_of))
        for ref in (f"refs/tags/{wanted}", f"refs/tags/v{wanted}", f"refs/heads/{wanted}"):
            if ref in self.refs:
                return self._at(ref)
        if re.fullmatch(r"[0-9a-f]{7,64}", wanted) and self.git.succeeds("cat-file", "-e", f"{wanted}^{{commit}}"):
            return Release(self.git("rev-parse", f"{wanted}^{{commit}}"), wanted)
        raise ReleaseUnknown(f"{self.source} has no release, branch or commit {wanted!r}{self._releases()}")

    def base(self, known: Record, target: Release) -> Release:
        """Return the commit that the checked-out commit of the clone is based on."""
        if commit := known.known_commit:
            if not self.git.succeeds("cat-file", "-e", f"{commit}^{{commit}}"):
                raise TemplateError(
                    f"{self.source} does not have the commit {commit}, which {record.FILE} names: is it the repository "
                    f"of the template?"
                )
            return Release(commit, known.release)
        if self.git.succeeds("merge-base", "HEAD", target.commit):
            return Release(self.git("merge-base", "HEAD", target.commit), known.release)
        if commit := self._with_tree_of_first_commit(target):
            return Release(commit, known.release)
        for ref in (f"refs/tags/v{known.release}", f"refs/tags/{known.release}"):
            if ref in self.refs:
                return Release(self.refs[ref], known.release)
        raise ReleaseUnknown(
            f"{record.FILE} names the release {known.release!r}, which {self.source} does not have{self._releases()}"
        )

    def _with_tree_of_first_commit(self, target: Release) -> str | None:
        first = self.git("rev-list", "--max-parents=0", "HEAD").splitlines()[-1]
        wanted = self.git("rev-parse", f"{first}^{{tree}}")
        log = self.git("log", "--format=%H %T", target.commit).splitlines()
        return next((commit for commit, _, tree in (line.partition(" ") for line in log) if tree == wanted), None)

    def _at(self, ref: str) -> Release:
        return Release(self.refs[ref], ref.removeprefix("refs/tags/").removeprefix("refs/heads/"))

    def _releases(self) -> str:
        names = [self._at(ref).label for ref in sorted(filter(VERSION.fullmatch, self.refs), key=version_of)]
        return f": its releases are {', '.join(names)}" if names else ""


def fetch(git: Git, source: str) -> Template:
    """Fetch all tags and branches of the template."""
    if not source:
        raise ReleaseUnknown("where is the template? Name its repository once: flotilla update --from URL-OR-PATH")
    if record.FORBIDDEN.search(source) or has_password(source):
        raise ReleaseUnknown(
            f"the address of the template is stored in {record.FILE}, so it must not contain a password, a quotation "
            f"mark or a backslash: configure a credential helper of git instead"
        )
    refs = {}
    for line in git("ls-remote", "--", source).splitlines():
        commit, ref = line.split("\t")
        # An annotated tag is listed twice: itself, and with `^{}` its commit.
        if ref.startswith(("refs/tags/", "refs/heads/")):
            refs[ref.removesuffix("^{}")] = commit
    given = "".join(f"{ref}\n" for ref in refs).encode()
    git("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--stdin", "--", source, given=given)
    return Template(git, source, refs)


def has_password(source: str) -> bool:
    try:
        return urlsplit(source).password is not None
    except ValueError:
        return False


def version_of(ref: str) -> tuple[int, ...]:
    found = VERSION.fullmatch(ref)
    assert found
    return tuple(map(int, found.groups()))
