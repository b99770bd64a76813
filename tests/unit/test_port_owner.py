"""Which process listens on a port."""

import os
import socket
from pathlib import Path

import pytest

from app.fleet.server.port_owner import port_owner


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_process_that_listens_on_a_port_is_named(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        port = listener.getsockname()[1]
        assert port_owner(port) is None, "it does not listen yet"
        listener.listen()
        owner = port_owner(port)
        assert owner is not None
        assert owner.startswith(f"pid {os.getpid()}: ")
    assert port_owner(port) is None


def test_a_system_without_these_files_names_nobody(tmp_path: Path) -> None:
    assert port_owner(80, tmp_path) is None
