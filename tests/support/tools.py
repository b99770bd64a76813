"""Programs that some tests need. Without its program, a test is skipped with a reason; in CI it fails."""

import os
import shutil
from typing import NoReturn

import pytest


def program(name: str) -> str:
    """Return the path of a program."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    return found or missing(f"{name} is not installed; scripts/tools installs it, where that is possible")


def network_namespaces() -> None:
    """Skip the test if network namespaces cannot be created."""
    if os.geteuid() != 0:
        missing("network namespaces need root")
    program("ip")


def process_namespaces() -> str:
    """Skip the test if process namespaces cannot be created; return the program that creates them."""
    if os.geteuid() != 0:
        missing("process namespaces need root")
    return program("unshare")


def missing(what: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"{what}, and CI skips nothing")
    pytest.skip(what)
