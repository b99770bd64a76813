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


def test_a_password_in_the_command_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text("header\n0: 0100007F:0050 00000000:0000 0A 0:0 0:0 0 0 0 4711 1\n")
    (tmp_path / "17" / "fd").mkdir(parents=True)
    (tmp_path / "17" / "fd" / "3").symlink_to("socket:[4711]")
    (tmp_path / "17" / "cmdline").write_bytes(b"server\0--password=hunter2\0")
    assert port_owner(80, tmp_path) == "pid 17: server --password=***"


def test_a_system_without_these_files_names_nobody(tmp_path: Path) -> None:
    assert port_owner(80, tmp_path) is None
