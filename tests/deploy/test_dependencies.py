"""All packages that the service imports are declared in pyproject.toml, and not only installed as dependencies."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from tests.deploy.declared import ROOT


def imported() -> set[str]:
    """Return the top-level packages that `app/` imports, without `app` and the standard library."""
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


def test_every_imported_package_is_declared() -> None:
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
