"""What the service imports is declared in pyproject.toml, and not merely there because something else needs it."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from tests.deploy.declared import ROOT


def imported() -> set[str]:
    """The top-level packages that `app/` imports, but for its own and the standard library's."""
    found = set()
    for path in (ROOT / "app").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"app"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", name)[0]).lower()


def test_every_import_is_declared() -> None:
    declared = {
        normal(each) for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    }
    providers = packages_distributions()
    missing = {
        package: providers[package]
        for package in imported()
        if not declared & {normal(each) for each in providers[package]}
    }
    assert not missing, f"imported, but not among the dependencies in pyproject.toml: {missing}"
