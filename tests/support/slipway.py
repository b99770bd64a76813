"""Launch many instances quickly: a process that has everything imported, and forks.

Most of what an instance's start costs is reading Python modules, and the tests start some hundreds of instances. The
slipway is one process for each test process: it has imported what an instance needs, nothing of which looks at the
environment, opens a file or starts a thread, and forks for each that is wanted. What comes off it is a process like any
other: its own session, its own environment, its own standard streams, ended by whatever ends a process.

Asked over a socket, one connection for each process: the request is what to run, with three file descriptors; the
answers are its id, and when it has ended, how. When the slipway ends, as it does when the tests do, whatever it has
launched is killed.

    slipway = Slipway()
    process = slipway.launch("app", ["serve"], env, cwd, (stdin, stdout, stderr))      # as `python -m app serve`

Not for a process whose interpreter is to be started differently (`PYTHONPATH`, `LD_PRELOAD`): `can_launch` says so.
"""

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What an instance imports, apart from what is its own: the application, its actions and its routes.
MODULES = (
    "alembic.command",
    "anyio._backends._asyncio",
    "app.fleet",
    "app.fleet.cli",
    "app.fleet.db.embedded",
    "app.fleet.http.actions",
    "app.fleet.http.auth",
    "app.fleet.http.edge",
    "app.fleet.http.events",
    "app.fleet.http.health",
    "app.fleet.http.locks",
    "app.fleet.http.metrics",
    "app.fleet.http.runs",
    "app.fleet.lifespan",
    "fastapi.sse",
    "httptools",
    "psycopg_pool",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.ext.asyncio",
    "uvicorn.lifespan.on",
    "uvicorn.main",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
)
# `DESK_…` is of the example service.
OF_THE_SERVICE = ("FLOTILLA_", "DATABASE_", "DESK_")
LONGEST = 1 << 20
DIE_WITH_PARENT = 1


class Launched:
    """A process that came off the slipway, with what `subprocess.Popen` has and the tests use."""

    def __init__(self, connection: socket.socket, arguments: Sequence[str]) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        self._answers = connection.makefile("r")
        self._connection = connection
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        return self.wait_for(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self.wait_for(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def wait_for(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            # The slipway itself is gone if there is no answer, and took this one with it.
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._answers.close()
            self._connection.close()
        return self.returncode


class ForkServer:
    """The tests' side of it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flotilla-slipway-")
        self._address = str(Path(self._folder.name) / "socket")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.slipway", self._address],
            env=plain_environment(os.environ) | {"PYTHONWARNINGS": "error"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C at a terminal is for the tests, which then end it.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the slipway did not start"

    @staticmethod
    def can_launch(env: Mapping[str, str]) -> bool:
        """Whether these settings, on top of the tests' environment, are the service's alone."""
        return all(name.startswith(OF_THE_SERVICE) for name in env)

    def launch(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, streams: tuple[int, int, int]
    ) -> Launched:
        """Run a module as `python -m` does, with this environment and these standard streams."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        request = {"module": module, "arguments": list(arguments), "env": dict(env), "cwd": str(cwd)}
        socket.send_fds(connection, [json.dumps(request).encode()], streams)
        connection.shutdown(socket.SHUT_WR)
        return Launched(connection, [module, *arguments])

    def run(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float
    ) -> "subprocess.CompletedProcess[str]":
        """Run one to its end, and return what it said."""
        with (
            Path(os.devnull).open() as nothing,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            process = self.launch(module, arguments, env, cwd, (nothing.fileno(), out.fileno(), err.fileno()))
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                raise
            said = [stream.read() for stream in (out, err) if stream.seek(0) == 0]
        return subprocess.CompletedProcess(process.args, code, *said)

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait(10)
        self._folder.cleanup()


@dataclass
class Job:
    """What a child has to do."""

    module: str
    arguments: list[str]
    env: dict[str, str]
    cwd: str


def plain_environment(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(OF_THE_SERVICE)}


def serve(address: str) -> Job | None:
    """Fork for whoever asks. Returns in each child, with its job; and at the end, without one, in the slipway."""
    for module in MODULES:
        importlib.import_module(module)
    selector = selectors.DefaultSelector()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                listener.close()
                return None
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request, descriptors = receive(connection)
                child = os.fork()
                if child == 0:
                    everything = [listener, connection, *(each.data[1] for each in watched(selector))]
                    for each in everything:
                        each.close()
                    for each in watched(selector):
                        os.close(each.fd)
                    selector.close()
                    return become(Job(**json.loads(request)), descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                notify_sql(connection, child)
                selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, connection))
            else:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                child, connection = key.data
                notify_sql(connection, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                connection.close()


def watched(selector: selectors.BaseSelector) -> list[selectors.SelectorKey]:
    return [key for key in selector.get_map().values() if key.data is not None]


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    request, descriptors, _, _ = socket.recv_fds(connection, LONGEST, 3)
    while part := connection.recv(LONGEST):
        request += part
    return request, descriptors


def notify_sql(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(f"{number}\n".encode())


def become(job: Job, descriptors: Sequence[int]) -> Job:
    """Make this process one of its own."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    os.setsid()
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(job.cwd)
    os.environ.clear()
    os.environ.update(job.env)
    sys.path[0] = job.cwd
    return job


def main() -> None:
    job = serve(sys.argv[1])
    if job is not None:
        sys.argv[1:] = job.arguments
        runpy.run_module(job.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
