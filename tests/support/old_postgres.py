"""A server that claims to be PostgreSQL 13. It knows only as much of the protocol as a client needs for the version.

A real PostgreSQL 13 cannot be installed everywhere the tests run, and only its version is checked.
"""

import socket
import struct
import threading
from typing import Self


def message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def parameter(name: str, value: str) -> bytes:
    return message(b"S", f"{name}\0{value}\0".encode())


GREETING = (
    message(b"R", struct.pack("!i", 0))
    + parameter("server_version", "13.14")
    + parameter("client_encoding", "UTF8")
    + parameter("standard_conforming_strings", "on")
    + message(b"K", struct.pack("!ii", 1234, 5678))
    + message(b"Z", b"I")
)
# The answer to `SHOW transaction_read_only`, which libpq sends to an old server that must be writable.
READ_ONLY_OFF = (
    message(b"T", struct.pack("!h", 1) + b"transaction_read_only\0" + struct.pack("!ihihih", 0, 0, 25, -1, -1, 0))
    + message(b"D", struct.pack("!hi", 1, 3) + b"off")
    + message(b"C", b"SHOW\0")
    + message(b"Z", b"I")
)


class OldPostgres:
    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"postgresql://postgres@127.0.0.1:{self._listener.getsockname()[1]}/postgres?sslmode=disable"
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                client.recv(65536)
                client.sendall(GREETING)
                while asked := client.recv(65536):
                    if asked.startswith(b"X"):
                        break
                    client.sendall(READ_ONLY_OFF)
