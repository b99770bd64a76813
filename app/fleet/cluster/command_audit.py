"""The audit log of the command line: the leader logs which operator changed what.

A command connects to PostgreSQL and to no instance. In the transaction of its change it sends a notification, and the
instance that is the leader logs `command.audited`. The notification may be lost, and nothing is logged while there is
no leader. Forced releases of locks, which must be kept, are rows as well.
"""

import getpass
import json
import os
import socket

from app.fleet.cluster.member import Member
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.telemetry.logs import event_log

# A notification has at most 8,000 bytes.
MAX_SUBJECT_LENGTH = 200

log = event_log(__name__)

NOTIFY = Statement("SELECT pg_notify('{channel}', 'command:' || %(done)s)")


def operator() -> str:
    """Return the user and host of this command."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        # Users in a container often have no name.
        user = f"user {os.getuid()}"
    return f"{user} on {socket.gethostname()}"


async def notify_leader(connection: Connection, namespace: Namespace, command: str, subject: str) -> None:
    """Let the leader log this command when the transaction commits."""
    done = {"by": operator(), "command": command, "subject": subject[:MAX_SUBJECT_LENGTH]}
    await connection.execute(namespace.sql(NOTIFY), {"done": json.dumps(done)})


def log_commands(member: Member) -> None:
    """Log the notified commands whenever this instance is the leader."""

    def log_if_leading(text: str) -> None:
        if member.leading:
            done = json.loads(text)
            log.info("command.audited", by=done["by"], command=done["command"], subject=done["subject"])

    member.on_notification("command", log_if_leading)
