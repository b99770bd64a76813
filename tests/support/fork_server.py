"""Start many instances quickly: a fork server has imported all modules, and forks once per instance.

Most of the start time of an instance is importing Python modules, and the tests start several hundred instances. Each
test process has one fork server. It imports the modules that an instance needs; none of them reads the environment,
keeps a file open or starts a thread on import. A forked process is an ordinary process: it has its own session,
environment and standard streams, and any signal that ends a process ends it.

Protocol: one connection of a UNIX socket per process. The request says what to run and carries three file descriptors.
The server answers with the process id, and later with the exit code. When the fork server ends, as it does at the end
of the tests, the kernel kills every process that it has started.

    fork_server = ForkServer()
    process = fork_server.launch("app", ["serve"], env, cwd, (stdin, stdout, stderr))      # as `python -m app serve`

Not for a process whose interpreter needs its own options (`PYTHONPATH`, `LD_PRELOAD`): `can_launch` returns False.
"""

import contextlib
import ctypes
import gc
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

# The modules that every instance imports. The application, its actions and its routes are imported after the fork.
MODULES = (
    "alembic.command",
    "anyio._backends._asyncio",
    "app.fleet",
    "app.fleet.cli",
    "app.fleet.dashboard",
    "app.fleet.db.embedded",
    "app.fleet.http.actions",
    "app.fleet.edge.auth",
    "app.fleet.edge.middleware",
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
# `DESK_…` are the settings of the example service.
SETTING_PREFIXES = ("FLOTILLA_", "DATABASE_", "DESK_")
MAX_REQUEST = 1 << 20
DIE_WITH_PARENT = 1


class Launched:
    """A process of the fork server, with those attributes of `subprocess.Popen` that the tests use."""

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
            # Without an answer the fork server itself has ended, and the kernel has killed this process with it.
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._answers.close()
            self._connection.close()
        return self.returncode


class ForkServer:
    """The client, used by the tests."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flotilla-fork-server-")
        self._address = str(Path(self._folder.name) / "socket")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", self._address],
            env=plain_environment(os.environ) | {"PYTHONWARNINGS": "error"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in a terminal must reach the tests only, which then end the fork server.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), "the fork server did not start"

    @staticmethod
    def can_launch(env: Mapping[str, str]) -> bool:
        """Whether these variables, added to the tests' environment, are all settings of the service."""
        return all(name.startswith(SETTING_PREFIXES) for name in env)

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
        """Run a module to its end, and return its exit code and output."""
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
            output = [stream.read() for stream in (out, err) if stream.seek(0) == 0]
        return subprocess.CompletedProcess(process.args, code, *output)

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait(10)
        self._folder.cleanup()


@dataclass
class Job:
    """What a forked process runs."""

    module: str
    arguments: list[str]
    env: dict[str, str]
    cwd: str


def plain_environment(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(SETTING_PREFIXES)}


def serve(address: str) -> Job | None:
    """Fork once per request. Return in each child with its job, and in the fork server, at its end, with None."""
    for module in MODULES:
        importlib.import_module(module)
    # A forked process does not go through the objects of these modules when it collects garbage.
    gc.collect()
    gc.freeze()
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
                    for inherited in (listener, connection, *(each.data[1] for each in watched(selector))):
                        inherited.close()
                    for each in watched(selector):
                        os.close(each.fd)
                    selector.close()
                    return become(Job(**json.loads(request)), descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                send(connection, child)
                selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, connection))
            else:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                child, connection = key.data
                send(connection, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                connection.close()


def watched(selector: selectors.BaseSelector) -> list[selectors.SelectorKey]:
    return [key for key in selector.get_map().values() if key.data is not None]


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    request, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3)
    while part := connection.recv(MAX_REQUEST):
        request += part
    return request, descriptors


def send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(f"{number}\n".encode())


def become(job: Job, descriptors: Sequence[int]) -> Job:
    """Give this process its own session, streams, directory and environment."""
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
