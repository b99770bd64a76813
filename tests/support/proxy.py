"""A TCP proxy that can refuse connections, reset them, or drop what passes, as broken networks and servers do."""

import contextlib
import selectors
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Self

RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Trap:
    """A sequence of messages after which a connection is reset: see `withhold_answer` and `lose`."""

    sent: tuple[bytes, ...]
    loses: bool = False
    then_refuse: bool = False


class Proxy:
    """Passes bytes between its port and a target."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self._swallowing = threading.Event()
        self._refusing = threading.Event()
        self._trap: Trap | None = None
        self.sprung = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self.listener.close()
        self.cut()

    def swallow(self) -> None:
        """Drop everything in both directions from now on, without closing a connection: half-open connections."""
        self._swallowing.set()

    def refuse(self) -> None:
        """Reset new connections at once."""
        self._refusing.set()

    def heal(self) -> None:
        """Pass everything again. Connections whose data was dropped stay dead, as in a real network."""
        self._swallowing = threading.Event()
        self._refusing.clear()

    def withhold_answer(self, *sent: bytes, then_refuse: bool = False) -> None:
        """Reset the connection that sends messages with these bytes, in this order, instead of passing the last answer.

        PostgreSQL has then executed the statement, but the client does not know. With `then_refuse`, all connections
        are reset, and new ones are refused.
        """
        self._trap = Trap(sent, then_refuse=then_refuse)

    def lose(self, *sent: bytes) -> None:
        """Reset the connection that sends such messages, instead of passing the last one to the server."""
        self._trap = Trap(sent, loses=True)

    def cut(self) -> None:
        """Reset all connections."""
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                    end.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            if self._refusing.is_set():
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client, self._swallowing), daemon=True).start()

    def _serve(self, client: socket.socket, swallowing: threading.Event) -> None:
        with client:
            try:
                server = socket.create_connection(self.target, timeout=5)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                return
            server.settimeout(None)
            self._pairs.append((client, server))
            with server, selectors.DefaultSelector() as ready, contextlib.suppress(OSError):
                ready.register(client, selectors.EVENT_READ, server)
                ready.register(server, selectors.EVENT_READ, client)
                self._pass_on(client, ready, swallowing)

    def _pass_on(self, client: socket.socket, ready: selectors.BaseSelector, swallowing: threading.Event) -> None:
        seen = 0
        unanswered: Trap | None = None
        while not self._closed:
            for key, _ in ready.select(0.2):
                source, sink = key.fileobj, key.data
                assert isinstance(source, socket.socket)
                data = source.recv(65536)
                if swallowing.is_set():
                    if not data:
                        # The other side does not see the end of the connection either.
                        ready.unregister(source)
                    continue
                if not data:
                    return
                if unanswered is not None and source is not client:
                    self._spring(unanswered, client)
                    return
                if source is client and self._trap is not None and self._trap.sent[seen] in data:
                    seen += 1
                    if seen == len(self._trap.sent):
                        unanswered, self._trap = self._trap, None
                        if unanswered.loses:
                            self._spring(unanswered, client)
                            return
                sink.sendall(data)

    def _spring(self, trap: Trap, client: socket.socket) -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        if trap.then_refuse:
            self.refuse()
            self.cut()
        self.sprung.set()
