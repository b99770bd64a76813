"""What the command line changed is in the log of the leader: who did what.

A command reaches PostgreSQL directly and no instance. It notifies the instances in the transaction of its change, and
the leader logs `command.audited`. A notification may be lost: while no instance leads, nothing is logged. What must be
kept (the forced release of a lock) has a row of its own.
"""

import getpass
import json
import os
import socket

from app.fleet.cluster.member import Member
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Connection
from app.fleet.telemetry.logs import events

# A notification may have 8,000 bytes.
SUBJECT_MOST = 200

log = events(__name__)

NOTIFY = Statement("SELECT pg_notify('{channel}', 'command:' || %(done)s)")


def operator() -> str:
    """Return who runs this command, and where."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        # In a container, whose users have no names.
        user = f"user {os.getuid()}"
    return f"{user} on {socket.gethostname()}"


async def announce(connection: Connection, namespace: Namespace, command: str, subject: str) -> None:
    """Have the leader log this command, if the transaction commits."""
    done = {"by": operator(), "command": command, "subject": subject[:SUBJECT_MOST]}
    await connection.execute(namespace.sql(NOTIFY), {"done": json.dumps(done)})


def log_commands(member: Member) -> None:
    """Log the commands of which this instance is notified while it is the leader."""

    def log_if_leading(text: str) -> None:
        if member.leading:
            done = json.loads(text)
            log.info("command.audited", by=done["by"], command=done["command"], subject=done["subject"])

    member.on_notification("command", log_if_leading)
