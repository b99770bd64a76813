"""Programs that some tests need beyond Python. Without one, a test says so and is skipped; CI skips nothing."""

import os
import shutil
from typing import NoReturn

import pytest


def program(name: str) -> str:
    """Return where it is."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    return found or missing(f"{name} is not installed; scripts/tools installs it, where that is possible")


def network_namespaces() -> None:
    """Go on only where they can be made."""
    if os.geteuid() != 0:
        missing("network namespaces need root")
    program("ip")


def process_namespaces() -> str:
    """Go on only where they can be made; return the program that makes them."""
    if os.geteuid() != 0:
        missing("process namespaces need root")
    return program("unshare")


def missing(what: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"{what}, and CI skips nothing")
    pytest.skip(what)
