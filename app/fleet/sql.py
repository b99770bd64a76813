"""Print the SQL statements that Flotilla sends, by name: `python -m app.fleet.sql runs.claim.CLAIM`.

Every statement that names a table is a constant of the type `Statement`, or a value of a mapping of statements. Its
name here is the module's name below `app.fleet`, a dot and the constant's name. It is printed as PostgreSQL receives
it, in the namespace `flotilla`, with the driver's placeholders.

`tests/golden/` has one file per statement, and a test compares them. So a diff shows every change of a statement,
whichever Python file was edited. `make golden` writes these files again.
"""

import argparse
import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from app import fleet
from app.fleet.db.namespace import Namespace, Statement

NAMESPACE = Namespace("flotilla")
# It imports pytest, which an image does not have, and has no statements.
WITHOUT_STATEMENTS = {"app.fleet.testing.fixtures"}


def statements() -> dict[str, str]:
    """Return every statement by its name, as it is sent."""
    found: dict[str, str] = {}
    for each in pkgutil.walk_packages(fleet.__path__, f"{fleet.__name__}."):
        if each.name in WITHOUT_STATEMENTS:
            continue
        module = importlib.import_module(each.name)
        for name, statement in of_module(module):
            found[f"{each.name.removeprefix(f'{fleet.__name__}.')}.{name}"] = rendered(statement)
    return dict(sorted(found.items()))


def of_module(module: ModuleType) -> Iterator[tuple[str, Statement]]:
    """Yield the statements that a module defines, without those that it imports."""
    for name in assigned(module):
        value = getattr(module, name, None)
        if isinstance(value, Statement):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", each) for key, each in value.items() if isinstance(each, Statement))


def assigned(module: ModuleType) -> Iterator[str]:
    """Yield the names that a module assigns."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def rendered(statement: Statement) -> str:
    return f"{NAMESPACE.sql(statement).decode().strip()}\n"


def write(folder: Path) -> None:
    """Write one file per statement, and delete the files of statements that no longer exist."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.sql"):
        old.unlink()
    for name, text in statements().items():
        (folder / f"{name}.sql").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m app.fleet.sql", description="Print SQL statements by name.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a statement's name, or the end of it (default: list all names)"
    )
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write each statement to a file in this folder")
    options = parser.parse_args()
    if options.write:
        write(options.write)
        return
    known = statements()
    matches = {name: [each for each in known if f".{each}".endswith(f".{name}")] for name in options.names}
    if unknown := [name for name, found in matches.items() if not found]:
        parser.error(f"no such statement: {', '.join(unknown)} (without a NAME, all names are listed)")
    for name in [each for found in matches.values() for each in found]:
        sys.stdout.write(f"-- {name}\n{known[name]}\n")
    if not options.names:
        sys.stdout.write("".join(f"{name}\n" for name in known))


if __name__ == "__main__":
    main()
