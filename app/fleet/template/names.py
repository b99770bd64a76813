"""The places that contain the service's name: `flotilla rename` changes them, and `flotilla update` in the release too.

The name is a DNS label, in Compose, the manifests and the project; the title is for people. Not renamed: the command
`flotilla`, the prefix `FLOTILLA_`, metrics, the namespace, and the roles and databases of PostgreSQL. They belong to
running deployments, or to the template.

A second rename finds its places by the present name. Therefore a name that these places contain already, such as
`postgres`, is refused: a later rename could not distinguish the two.

The files are written one after another. A process that is killed in between leaves the new name in some of them, and
the next call refuses it: `git restore .` first (docs/guides/rename.md).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from app.fleet.errors import NameInvalid
from app.fleet.template import record
from app.fleet.template.record import Record

# The names that are made of it, such as NAME-postgres-app, have at most 63 characters too.
LABEL = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True)
class Place:
    """The name, or the title, between these two patterns."""

    before: str
    after: str
    is_title: bool = False

    def pattern(self, of: Record) -> re.Pattern[str]:
        value = re.escape(of.title if self.is_title else of.name)
        return re.compile(f"({self.before}){value}(?={self.after})", re.MULTILINE)

    def renamed(self, text: str, before: Record, after: Record) -> str:
        value = after.title if self.is_title else after.name
        return self.pattern(before).sub(lambda found: found[1] + value, text)


# By file or folder.
PLACES = {
    "README.md": [Place(r"\A# ", "$", is_title=True)],
    "pyproject.toml": [Place('^name = "', '"$')],
    "app/main.py": [Place(r'\btitle="', '"', is_title=True)],
    "docker-compose.yml": [Place("^name: ", "$"), Place(r"\bimage: ", ":local$")],
    "k8s/": [
        # Names, labels, selectors, images and secrets.
        Place("[nN]ame: |/name=|image: ", r"(?![\w.])"),
        # Host names of the route and of the database for trials.
        Place("- ", r"\.example$"),
        Place("@", "-postgres:"),
        # Comments.
        Place(r"\bservice/|\bcalled ", r"\b"),
        Place(r"\b", r":dev\b"),
        Place("`", "`|-worker`"),
    ],
    # Commands in the guides.
    "docs/guides/": [
        Place("kubectl create secret generic ", r"(?![\w.])"),
        Place("docker build --tag |run … ", ":"),
        Place(r"\bdeployment/|\bservice/", r"(?![\w.])"),
    ],
}


def places(path: str) -> list[Place]:
    """Return the places that this file may have."""
    if path in PLACES:
        return PLACES[path]
    if not path.endswith((".yaml", ".yml", ".md")):
        return []
    return next((found for key, found in PLACES.items() if key.endswith("/") and path.startswith(key)), [])


def renamed(path: str, text: str, before: Record, after: Record) -> str:
    """Return the text of this file with the new name and title."""
    for place in places(path):
        text = place.renamed(text, before, after)
    return text


def files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the files that may contain the name, with their texts."""
    for key in PLACES:
        for path in sorted((folder / key).rglob("*")) if key.endswith("/") else [folder / key]:
            name = path.relative_to(folder).as_posix()
            if places(name) and path.is_file():
                yield name, path.read_text()


def rename(folder: Path, name: str, title: str | None) -> list[str]:
    """Rename the service in this folder. Return the files that have changed."""
    before = Record.read(folder)
    after = replace(before, name=name, title=title or name.replace("-", " ").capitalize())
    check(after)
    found = dict(files(folder))
    if after.name != before.name:
        check_is_free(after, found)
    changed = {path: text for path, old in found.items() if (text := renamed(path, old, before, after)) != old}
    if after != before:
        changed[record.FILE] = after.text()
    for path, text in changed.items():
        (folder / path).write_text(text)
    return list(changed)


def check(wanted: Record) -> None:
    if not LABEL.fullmatch(wanted.name):
        raise NameInvalid(
            f"{wanted.name!r} is not a DNS label: use 1 to 40 lower-case letters, digits and hyphens, with a letter at "
            f"the beginning and no hyphen at the end"
        )
    if record.FORBIDDEN.search(wanted.title) or not 1 <= len(wanted.title) <= 100:
        raise NameInvalid("a title has 1 to 100 characters, without quotation marks, backslashes and line breaks")


def check_is_free(wanted: Record, found: dict[str, str]) -> None:
    for path, text in found.items():
        if any(not place.is_title and place.pattern(wanted).search(text) for place in places(path)):
            raise NameInvalid(f"{path} already uses the name {wanted.name!r} for something else: choose another")
