"""Which process listens on a port of this machine: for the text that says that the port is taken. Linux only.

The command is redacted, because its arguments may contain a password.
"""

from collections.abc import Iterator
from pathlib import Path

from app.fleet.telemetry.redaction import redact

LISTENING = "0A"
# Characters of the command.
SHOWN = 80


def port_owner(port: int, proc: Path = Path("/proc")) -> str | None:
    """Return the pid and the command of the process, or None if this user may not see it."""
    sockets = {f"socket:[{inode}]" for inode in inodes(port, proc)}
    for process in proc.glob("[0-9]*"):
        try:
            if any(str(each.readlink()) in sockets for each in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"pid {process.name}: {redact(command)[:SHOWN]}"
        except OSError:
            # It belongs to another user, or has ended meanwhile.
            continue
    return None


def inodes(port: int, proc: Path) -> Iterator[str]:
    """Yield the numbers of the sockets that listen on the port."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and int(local.rpartition(":")[2], 16) == port:
                yield inode
