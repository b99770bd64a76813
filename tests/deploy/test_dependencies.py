"""All packages that the service imports are declared in pyproject.toml, and not only installed as dependencies."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

from tests.deploy.declared import ROOT

# The testing kit may also import what is in the group `dev`; the service does not import the kit.
KIT = ROOT / "app" / "fleet" / "testing"


def imported(*, by_the_kit: bool) -> set[str]:
    """Return the top-level packages that `app/` imports, without `app` and the standard library."""
    found = set()
    for path in (ROOT / "app").rglob("*.py"):
        if path.is_relative_to(KIT) is not by_the_kit:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"app"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", name)[0]).lower()


@pytest.mark.parametrize("by_the_kit", [False, True])
def test_every_imported_package_is_declared(by_the_kit: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    development = [each for each in project["dependency-groups"]["dev"] if isinstance(each, str)]
    declared = {normal(each) for each in project["project"]["dependencies"] + (development if by_the_kit else [])}
    providers = packages_distributions()
    missing = {
        package: providers[package]
        for package in imported(by_the_kit=by_the_kit)
        if not declared & {normal(each) for each in providers[package]}
    }
    assert not missing, f"imported, but not among the dependencies in pyproject.toml: {missing}"
